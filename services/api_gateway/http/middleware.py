"""What every answer goes through: request ids, keys, CORS, and errors in OpenAI's shape."""

import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from blockyard.services.api_gateway.endpoints.generation import JSON
from blockyard.services.api_gateway.http.access import Access, Guard
from blockyard.services.api_gateway.http.client_text import escaped
from blockyard.services.api_gateway.http.request_context import MAX_ID_CHARS, REQUEST_ID, TENANT
from blockyard.services.api_gateway.responses.error_body import ApiError, body
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.gateway import CorsConfig, GatewayConfig

log = logging.getLogger(__name__)

BODILESS = ("", "application/octet-stream")  # what clients send with an empty body; web pages have to ask first


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=error.status, body=body(error), content_type=JSON, headers=headers)


def errors(gateway: Gateway) -> Middleware:
    """Outermost but for the request id: whatever is refused is refused in one shape."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ApiError as e:
            response = error_response(e)
        except web.RequestPayloadError as e:
            response = error_response(ApiError(f"the body cannot be read: {e.__cause__ or e}", "body"))
            response.force_close()
        except web.HTTPException as e:
            if e.status < 400:
                raise
            response = error_response(_known(request, e))
        except Exception:  # a fault of ours: the caller gets an answer, the log the story
            log.exception("%s %s failed", request.method, escaped(request.path))
            response = error_response(ApiError("The server failed at this request.", status=500))
        if response.status >= 400 and not request.content.is_eof():  # the rest of the body is not waited for
            response.force_close()
        gateway.meters.responded(response.status)
        return response

    return middleware


def request_ids(config: GatewayConfig) -> Middleware:
    """The caller's X-Request-Id, or one of ours, in answers' ids and, if the deployment wants it, in a header."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        sound = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_CHARS
        REQUEST_ID.set(given if sound else secrets.token_hex(16))
        began = time.monotonic()
        response = await handler(request)
        if config.access_log and request.method == "POST":
            took_ms = 1000 * (time.monotonic() - began)
            log.info("%s %s %d in %.0f ms", REQUEST_ID.get(), escaped(request.path), response.status, took_ms)
        return response

    return middleware


def authorized(guard: Guard) -> Middleware:
    """Asks for the key that the matched route wants; the key's place in the list is the tenant."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        TENANT.set(guard.tenant(request))
        return await handler(request)

    return middleware


def json_only(guard: Guard) -> Middleware:
    """A body of another type is a 415: a web page may send text/plain to any server without asking it first."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST":
            given = request.headers.get("Content-Type", "")
            kind = given.partition(";")[0].strip().lower()
            bodiless = kind in BODILESS and not request.can_read_body and guard.access(request) is not Access.KEY
            if kind != JSON and not bodiless:
                raise ApiError(f"Content-Type must be {JSON}, got {given[:100]!r}", "Content-Type", status=415)
        return await handler(request)

    return middleware


def counted(gateway: Gateway) -> Middleware:
    """Counts what the drain waits for, and refuses what open connections still bring after SIGTERM."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        if gateway.draining:
            response = error_response(ApiError("The server is shutting down.", status=503, retry_after_s=1.0))
            response.force_close()
            return response
        gateway.num_active += 1
        try:
            return await handler(request)
        finally:
            gateway.num_active -= 1

    return middleware


def cors(config: CorsConfig) -> tuple[Middleware, Callable[[web.Request, web.StreamResponse], Awaitable[None]]]:
    """Answers preflights; the second function puts the headers on every response, streamed ones too."""

    def allowed(request: web.Request) -> str:
        origin = request.headers.get("Origin", "")
        if origin and "*" in config.allowed_origins:
            return origin if config.allow_credentials else "*"
        return origin if origin in config.allowed_origins else ""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None:
            return await handler(request)
        if not allowed(request):
            raise ApiError(f"origin {request.headers.get('Origin', '')[:200]!r} is not allowed", "Origin", 403)
        headers = request.headers.get("Access-Control-Request-Headers", "")
        methods = asked if "*" in config.allowed_methods else ", ".join(config.allowed_methods)
        if "*" not in config.allowed_headers:
            headers = ", ".join(config.allowed_headers)
        preflight = {"Access-Control-Allow-Methods": methods, "Access-Control-Max-Age": "600"}
        if headers:
            preflight["Access-Control-Allow-Headers"] = headers
        return web.Response(status=200, headers=preflight)

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        if origin := allowed(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After, X-Blockyard-Ignored"
            if config.allow_credentials:
                response.headers["Access-Control-Allow-Credentials"] = "true"

    return middleware, on_prepare


def _known(request: web.Request, e: web.HTTPException) -> ApiError:
    if e.status == 404:
        return ApiError(f"There is nothing at {request.path[:200]}.", status=404, code="not_found")
    if e.status == 405:
        return ApiError(f"{request.path[:200]} does not take {request.method}.", status=405, code="method_not_allowed")
    if e.status == 413:
        return ApiError("The body is larger than this server takes.", "body", status=413)
    return ApiError(e.text or e.reason, status=e.status)
