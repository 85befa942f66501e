"""JSON responses, and the response for a `RequestError` in the form of an API."""

import math

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.interface import Api
from blockyard.shared.errors import RequestError

JSON = "application/json"


def json_response(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)


def error_response(error: RequestError, api: Api = CHAT) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    status = api.error_statuses.get(error.status, error.status)
    return web.Response(status=status, body=api.error_body(error), content_type=JSON, headers=headers)
