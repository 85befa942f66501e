"""JSON responses, and OpenAI's error object for a `RequestError`."""

import math

import msgspec
from aiohttp import web

from blockyard.shared.errors import RequestError

JSON = "application/json"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
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


def error_body(error: RequestError) -> bytes:
    error_type = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = error.code or _CODES.get(error.status)
    return msgspec.json.encode(ErrorBody(ErrorInfo(str(error), error_type, error.field or None, code)))


def json_response(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)


def error_response(error: RequestError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=error.status, body=error_body(error), content_type=JSON, headers=headers)
