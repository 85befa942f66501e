"""Middleware of users, for --middleware: of all three kinds, and some that answer wrongly."""

import asyncio
from typing import Any

from aiohttp import web
from starlette.responses import JSONResponse


class Named:
    """Adds its name to a header of each answer: the outermost is last."""

    name = ""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-passed", self.name.encode())]
            await send(message)

        await self.app(scope, receive, named)


class First(Named):
    name = "first"


class Second(Named):
    name = "second"


class Upper(Named):
    """Reads the body and sends another on, and changes path and headers."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/renamed":
            scope = scope | {"path": "/v1/models"}
        await self.app(scope, receive, send)


class Collects(Named):
    """Buffers the whole answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kept: list[Any] = []

        async def keep(message: Any) -> None:
            kept.append(message)

        await self.app(scope, receive, keep)
        start, bodies = kept[0], kept[1:]
        await send(start)
        await send({"type": "http.response.body", "body": b"".join(m["body"] for m in bodies)})


class Raises(Named):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise LookupError("secret of the middleware")


class BadHeader(Named):
    """Adds a header that no answer may have."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b\r\nx-c: d")]})
        await send({"type": "http.response.body", "body": b"x"})


class BadStatus(Named):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 99999, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})


class Silent(Named):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        return


class Hangs(Named):
    waiting = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        Hangs.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            Hangs.waiting -= 1


class Twice(Named):
    """Answers itself, and lets the gateway answer too."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"tea"})
        await self.app(scope, receive, send)


class Breaks(Named):
    """Raises in the middle of an answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def broken(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                raise LookupError("within")
            await send(message)

        await self.app(scope, receive, broken)


class Shortens(Named):
    """Cuts the body, and leaves its length as it was."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def cut(message: Any) -> None:
            if message["type"] == "http.response.body":
                message["body"] = message["body"][:5]
            await send(message)

        await self.app(scope, receive, cut)


class NotMade:
    def __init__(self, app: Any) -> None:
        raise LookupError("cannot be made")


async def function(request: Any, call_next: Any) -> Any:
    if request.headers.get("x-deny"):
        return JSONResponse({"denied": True}, status_code=403)
    response = await call_next(request)
    response.headers["x-passed"] = f"function {request.url.path}"
    return response


@web.middleware
async def of_aiohttp(request: Any, handler: Any) -> Any:
    response = await handler(request)
    if not response.prepared:
        response.headers["x-passed"] = "aiohttp"
    return response


@web.middleware
async def raises_in_aiohttp(request: Any, handler: Any) -> Any:
    raise LookupError("secret of the middleware")


@web.middleware
async def nothing_in_aiohttp(request: Any, handler: Any) -> Any:
    return None


def a_plain_function(request: Any, call_next: Any) -> Any:
    return None
