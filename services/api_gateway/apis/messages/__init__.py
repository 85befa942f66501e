"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

`schemas` has the fields of a body, `conversation` makes its blocks the gateway's own chat messages, `parse` checks the
rest, `events` and `whole` write answers, and `errors` their errors. `signatures` are those of thinking blocks,
`partial_json` reads the input of a call in which an answer ends, and `models` writes the list of models. `api` is what
the registry lists.
"""
