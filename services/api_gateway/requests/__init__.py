"""From the bytes of a request body to a checked `GenerateRequest`. No sockets but that of the body process.

`BodyParser` parses small bodies in place and large ones in a process of their own (`body_process`), so that no open
stream pauses; both call `parse_body`. It decodes by `schemas` (field names and types), builds the prompts in
`prompt_fields` and checks ranges and combinations in `validate`.

To add a request field: declare it in `schemas`, read it in `validate`, and carry it in `GenerateRequest`, or in
`ResponseOptions` if it only changes how the answer looks.
"""
