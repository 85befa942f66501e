"""Facts about the request that the current task serves, set by middleware.

Context variables, because `web.RequestKey` needs a newer aiohttp than the oldest supported one.
"""

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id")  # the client's X-Request-Id, or a generated one
TENANT: ContextVar[str] = ContextVar("tenant", default="")  # of the API key
IGNORED: ContextVar[str] = ContextVar("ignored", default="")  # the request's unknown fields, as the header's value
