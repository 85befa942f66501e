"""JSON responses, and the response for a `RequestError` with the error body of an API."""

import math

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.apis.interface import ErrorBody
from blockyard.services.api_gateway.apis.openai_fields import error_body as openai_error_body
from blockyard.shared.errors import RequestError

JSON = "application/json"


def json_response(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)


def error_response(error: RequestError, error_body: ErrorBody = openai_error_body) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=error.status, body=error_body(error), content_type=JSON, headers=headers)
