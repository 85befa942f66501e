"""Errors as Anthropic's API writes them: their body, their types, and the HTTP status of an overloaded server."""

import msgspec

from blockyard.shared.errors import RequestError

STATUSES = {503: 529}  # clients take 529 for a server that is overloaded or not ready
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorDetail


def error_body(error: RequestError) -> bytes:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(MessagesError(ErrorDetail(kind, _message(error))))


def _message(error: RequestError) -> str:
    """The message begins with the field, which the body has no other place for."""
    if error.too_long is not None:  # clients look for these words and shorten their history
        return f"prompt is too long: {error.too_long.num_tokens} tokens > {error.too_long.max_tokens} maximum"
    field, said = error.field, str(error)
    return f"{field}: {said}" if field and not said.startswith(field) else said
