"""What a caller is told when a request cannot be served: the OpenAI error body and its HTTP status."""

import msgspec

from blockyard.shared.errors import RequestError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_CODES = {
    401: "invalid_api_key",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}


class ErrorInfo(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorInfo


ApiError = RequestError


def body(error: RequestError) -> bytes:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = error.code or _CODES.get(error.status)
    return msgspec.json.encode(ErrorBody(ErrorInfo(str(error), kind, error.field or None, code)))
