"""From decoded fields to a checked `GenerateRequest`. No sockets.

`schemas` has the fields of chat, completions, tokenize and detokenize (names and types), `prompt_fields` builds prompts
and `validate` checks ranges and combinations. `IgnoredFields` reports unknown fields.

To add a request field: declare it in `schemas`, read it in `validate`, and carry it in `GenerateRequest`, or in
`ResponseOptions` if it only changes how the answer looks.
"""
