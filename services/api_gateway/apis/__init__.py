"""The APIs that clients speak: one `Api` each, from the fields of a body to the bytes of answers, ends and errors.

`interface` says what an `Api` is, `registry` lists them. `chat`, `completions` and `responses` are OpenAI's;
`openai_fields` has what they share, with `logprobs` and `text_offsets`. `messages` are Anthropic's, `pooling` the
endpoints of pooling models. An API knows neither sockets nor the ring: it is given parts of an answer
(`shared/output_parsing`), or results, and returns bytes. How one is added: the docstring of `services/api_gateway`.
"""
