"""Chat messages to the text of a prompt, with the template of the model or of the request.

`chat_template` renders, in the `sandbox`. Before that, `instruction_turns` places system and developer messages that
stand between turns, and `chat_messages` gives messages the form that templates expect. `pair_template` and
`text_template` write the texts of pooling models. Nothing here knows tokens.
"""
