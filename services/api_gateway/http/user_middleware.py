"""Middleware of users: --middleware. Without the flag no request passes anything of this file.

A name stands for an ASGI class, `Class(app)`; for an async function `(request, call_next)`, as Starlette's; or for an
aiohttp middleware, a function with `@web.middleware`. ASGI middleware is around the whole application; that of aiohttp
is the outermost of its middleware. All see every route, also unknown ones, before keys and CORS.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import import_module  # users name their modules
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from blockyard.services.api_gateway.http.access import Guard
from blockyard.services.api_gateway.http.asgi_answer import AsgiAnswer, AsgiApp, scope_of
from blockyard.services.api_gateway.http.asgi_gateway import AsgiGateway
from blockyard.services.api_gateway.http.request_context import client_is_gone
from blockyard.services.api_gateway.responses.json_response import error_response
from blockyard.shared.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

AsgiClass = Callable[[AsgiApp], AsgiApp]
Handle = Callable[[Any], Awaitable[web.StreamResponse]]

KINDS = "an ASGI class, an async function (request, call_next) or an aiohttp middleware (@web.middleware)"


class UserMiddleware:
    """The middleware of --middleware, imported. The first is the outermost."""

    def __init__(self, names: Sequence[str], guard: Guard) -> None:
        """Raises ConfigError for a name that cannot be used."""
        self._guard = guard
        self._classes: list[tuple[str, AsgiClass]] = []
        self._of_aiohttp: list[Middleware] = []
        for name in names:
            found = _find(name)
            if getattr(found, "__middleware_version__", 0) == 1:
                self._of_aiohttp.append(found)
            elif self._of_aiohttp:
                raise ConfigError(
                    f"--middleware {name}: aiohttp middleware is inside that of ASGI: give its names last"
                )
            else:
                self._classes.append((name, _asgi_class(name, found)))

    def of_aiohttp(self) -> list[Middleware]:
        """aiohttp's middleware, inside one that answers 500 for what they raise."""
        return [self._answered, *self._of_aiohttp] if self._of_aiohttp else []

    def around(self, handle: Handle, make_request: Callable[..., web.BaseRequest]) -> Handle:
        """Returns the handler of all requests with the ASGI middleware around it. Raises ConfigError."""
        if not self._classes:
            return handle
        app: AsgiApp = AsgiGateway(handle, make_request)
        for name, make in reversed(self._classes):
            try:
                app = make(app)
            except Exception as e:  # a user's class may raise anything
                raise ConfigError(f"--middleware {name}: {type(e).__name__}: {e}") from e
        return partial(self._serve, app)

    async def _serve(self, app: AsgiApp, request: web.BaseRequest) -> web.StreamResponse:
        answer = AsgiAnswer(request)
        try:
            await app(scope_of(request), answer.receive, answer.send)
        except Exception:  # a user's class may raise anything
            if client_is_gone(request):
                log.debug("a middleware failed at %s after its client left", request.method)
            else:
                log.exception("a middleware failed at %s", request.method)
        return answer.end(partial(self._failed, request))

    @property
    def _answered(self) -> Middleware:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                response: object = await handler(request)
            except web.HTTPException:
                raise
            except Exception as e:  # a user's function may raise anything
                if isinstance(e, ConnectionError) and client_is_gone(request):
                    raise
                log.exception("a middleware failed at %s", request.method)
                return self._failed(request)
            if not isinstance(response, web.StreamResponse):
                log.error("a middleware returned %s, and no response", type(response).__name__)
                return self._failed(request)
            return response

        return middleware

    def _failed(self, request: web.BaseRequest) -> web.Response:
        error = RequestError("A middleware of this server failed at this request.", status=500)
        return error_response(error, self._guard.api_of_path(request))


def _find(name: str) -> Any:
    module, dot, attribute = name.replace(":", ".").rpartition(".")
    if not dot:
        raise ConfigError(f"--middleware {name}: a name needs a module, as in package.module.name")
    try:
        return getattr(import_module(module), attribute)
    except Exception as e:  # a user's module may raise anything
        raise ConfigError(f"--middleware {name}: {type(e).__name__}: {e}") from e


def _asgi_class(name: str, found: Any) -> AsgiClass:
    if inspect.isclass(found):
        return cast(AsgiClass, found)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"--middleware {name}: {type(found).__name__} is not {KINDS}")
    try:
        from starlette.middleware.base import BaseHTTPMiddleware  # noqa: PLC0415  optional package
    except ImportError as e:
        raise ConfigError(f"--middleware {name}: a function (request, call_next) needs the package starlette") from e
    return partial(BaseHTTPMiddleware, dispatch=found)
