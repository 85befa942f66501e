"""From the bytes of a request body to the parsed request.

`BodyParser` parses small bodies in place and large ones in a process of their own (`body_process`, by `body_frames`),
so that no open stream pauses; both call `parse_body`, which finds the API of the path and lets it read the fields.
"""
