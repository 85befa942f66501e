"""Facts about the request that the current task serves, set by middleware, and whether its client is still there.

Context variables, because `web.RequestKey` needs a newer aiohttp than the oldest supported one.
"""

from contextvars import ContextVar

from aiohttp import web

REQUEST_ID: ContextVar[str] = ContextVar("request_id")  # the client's X-Request-Id, or a generated one
TENANT: ContextVar[str] = ContextVar("tenant", default="")  # of the API key
IGNORED: ContextVar[str] = ContextVar("ignored", default="")  # the request's unknown fields, as the header's value


def client_is_gone(request: web.BaseRequest) -> bool:
    """True as soon as the connection is closing, which may be before aiohttp cancels the handler."""
    transport = request.transport
    return transport is None or transport.is_closing()
