"""Who is being answered: set by middleware for the task that serves the request.

Context variables, because aiohttp's own place for it (`web.RequestKey`) is younger than the versions we run on.
"""

from contextvars import ContextVar

MAX_ID_CHARS = 128  # of a request's id, wherever it is given

REQUEST_ID: ContextVar[str] = ContextVar("request_id")  # the caller's X-Request-Id, or one of ours
TENANT: ContextVar[str] = ContextVar("tenant", default="")  # by API key
IGNORED: ContextVar[str] = ContextVar("ignored", default="")  # unknown fields of the request, as a header names them
