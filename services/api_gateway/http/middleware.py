"""aiohttp middleware of all routes: request ids, errors in the form of the API, keys, content types, draining, CORS."""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from blockyard.services.api_gateway.http.access import Access, Guard
from blockyard.services.api_gateway.http.client_text import escaped
from blockyard.services.api_gateway.http.request_context import REQUEST_ID, TENANT, client_is_gone
from blockyard.services.api_gateway.requests.generate_request import MAX_ID_CHARS
from blockyard.services.api_gateway.responses.json_response import error_response
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.services.gateway import CorsConfig, GatewayConfig
from blockyard.shared.errors import RequestError

log = logging.getLogger(__name__)

BODILESS = ("", "application/octet-stream")  # content types of an empty body; a browser sends a preflight for them


def errors(gateway: Gateway, guard: Guard) -> Middleware:
    """Turns every error into the error body of the route's API. Only `request_ids` is outside of it."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        api = guard.api(request)
        try:
            response = await handler(request)
        except RequestError as e:
            response = error_response(e, api)
        except web.RequestPayloadError as e:
            response = error_response(RequestError(f"the body cannot be read: {e.__cause__ or e}", "body"), api)
            response.force_close()
        except web.HTTPException as e:
            if e.status < 400:
                raise
            response = error_response(_http_error(request, e), api)
            if "Allow" in e.headers:
                response.headers["Allow"] = e.headers["Allow"]
        except Exception as e:
            if isinstance(e, ConnectionError) and client_is_gone(request):
                raise  # nobody to answer: `JsonErrorHandler` closes the connection
            # a bug: the client gets a 500 and the log the traceback
            log.exception("%s %s failed", request.method, escaped(request.path))
            response = error_response(RequestError("The server failed at this request.", status=500), api)
        if response.status >= 400 and not request.content.is_eof():  # does not wait for the rest of the body
            response.force_close()
        gateway.meters.responded(response.status)
        return response

    return middleware


def request_ids(config: GatewayConfig) -> Middleware:
    """Takes the client's X-Request-Id or makes one. It is part of the answer's id, and optionally a header."""
    root = "/" + config.root_path.strip("/")
    unlogged = {f"{prefix}{path.rstrip('/')}" for path in config.unlogged_paths for prefix in ("", root.rstrip("/"))}

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        valid = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_CHARS
        REQUEST_ID.set(given if valid else secrets.token_hex(16))
        began = time.monotonic()
        response = await handler(request)
        if config.access_log and request.method == "POST" and request.path.rstrip("/") not in unlogged:
            took_ms = 1000 * (time.monotonic() - began)
            log.info("%s %s %d in %.0f ms", REQUEST_ID.get(), escaped(request.path), response.status, took_ms)
        return response

    return middleware


def authorized(guard: Guard) -> Middleware:
    """Requires the key that the matched route needs, and sets its tenant."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        TENANT.set(guard.tenant(request))
        return await handler(request)

    return middleware


def json_only(guard: Guard) -> Middleware:
    """Answers 415 to other content types: browsers send text/plain to any server without a preflight.

    A form, which a browser sends without one too, is taken where a route asks for it.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST":
            given = request.headers.get("Content-Type", "")
            kind = given.partition(";")[0].strip().lower()
            bodiless = kind in BODILESS and not request.can_read_body and guard.access(request) is not Access.KEY
            wanted = guard.body_type(request)
            if wanted and kind != wanted and not bodiless:
                raise RequestError(f"Content-Type must be {wanted}, got {given[:100]!r}", "Content-Type", status=415)
        return await handler(request)

    return middleware


def counted(gateway: Gateway, guard: Guard) -> Middleware:
    """Counts the POST requests that draining waits for, and refuses new ones while draining."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        if gateway.draining:
            error = RequestError("The server is shutting down.", status=503, retry_after_s=1.0)
            response = error_response(error, guard.api(request))
            response.force_close()
            return response
        with gateway.counted():
            return await handler(request)

    return middleware


def cors(config: CorsConfig) -> tuple[Middleware, Callable[[web.Request, web.StreamResponse], Awaitable[None]]]:
    """The middleware answers preflights; the second function adds headers to every response, also streamed ones."""

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
            raise RequestError(f"origin {request.headers.get('Origin', '')[:200]!r} is not allowed", "Origin", 403)
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


def _http_error(request: web.Request, e: web.HTTPException) -> RequestError:
    if e.status == 404:
        return RequestError(f"There is nothing at {request.path[:200]}.", status=404, code="not_found")
    if e.status == 405:
        return RequestError(
            f"{request.path[:200]} does not take {request.method}.", status=405, code="method_not_allowed"
        )
    if e.status == 413:
        return RequestError("The body is larger than this server takes.", "body", status=413)
    return RequestError(e.text or e.reason, status=e.status)
