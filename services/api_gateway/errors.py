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
    413: "request_too_large",
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


class ApiError(RequestError):
    """A refusal as the caller sees it. `retry_after_s` becomes the Retry-After header."""

    def __init__(
        self,
        message: str,
        field: str = "",
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, field, status)
        self.code = code or _CODES.get(status)
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return msgspec.json.encode(ErrorBody(ErrorInfo(str(self), kind, self.field or None, self.code)))


def not_built(field: str, instead: str = "") -> ApiError:
    """A field we know, whose effect we do not have: saying so beats an answer that ignored it."""
    return ApiError(
        f"`{field}` is not built yet{'; ' + instead if instead else ''}", field, code="unsupported_parameter"
    )
