"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

`schemas` has the fields of a body, `conversation` makes its blocks the gateway's own chat messages, `tools` reads tools
and `parse` checks the rest. `events` writes answers, streamed and whole, and `errors` their errors. `partial_json`
reads the input of a call in which an answer ends. `api` has the `Api` that the registry lists, and the list of models.
"""
