"""Clients that leave, on real sockets: their requests are cancelled, and the log has no error about them."""

import asyncio
import logging
import socket
from typing import Any

import msgspec
import pytest
from user_middlewares import First, function, of_aiohttp

from blockyard.shared.messages import Cancel, Generate, Role

CLIENTS = 64
MIDDLEWARE = {"none": [], "asgi": [First], "starlette": [First, function], "aiohttp": [of_aiohttp]}


def names(*found: Any) -> list[str]:
    return [f"user_middlewares.{each.__name__}" for each in found]


def post(stream: bool, num_tokens: int = 4) -> bytes:
    body = msgspec.json.encode({"model": "tiny", "prompt": "hello", "max_tokens": num_tokens, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@pytest.fixture(params=MIDDLEWARE)
def middleware(request: pytest.FixtureRequest) -> list[str]:
    return names(*MIDDLEWARE[request.param])


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("silent", [Role.TOKENIZER_POOL, Role.SCHEDULER, None])
async def test_many_leave_at_once_before_the_end(rig, caplog, middleware, silent) -> None:
    """silent: what their requests wait for; None: they leave in the middle of their answers."""
    async with rig(middleware=middleware) as r:
        r.ring.silent, r.ring.step_s = {silent} - {None}, 0.001
        pairs = [await asyncio.open_connection("127.0.0.1", r.port) for _ in range(CLIENTS)]
        for i, (_, writer) in enumerate(pairs):
            writer.write(post(stream=i % 2 == 0, num_tokens=200))
        await r.until(lambda: r.gateway.num_active == CLIENTS)  # not all of them are sent yet
        await r.until(lambda: silent is not None or r.gateway.meters.output_tokens > 8 * CLIENTS)
        for i, (_, writer) in enumerate(pairs):
            writer.close() if i % 4 < 2 else writer.transport.abort()
        await r.until(lambda: r.gateway.num_active == 0)
        sent = {frame.request_id for frame in r.ring.frames(Generate)}
        assert {frame.request_id for frame in r.ring.frames(Cancel)} == sent
        assert bool(sent) is (silent != Role.TOKENIZER_POOL) and r.gateway.journal.entries == {}
    assert errors(caplog) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_many_leave_at_the_end_of_their_answers(rig, caplog, middleware, stream) -> None:
    """The gateway sees them leave after it has sent the last bytes, and before their handlers have returned."""

    def ask(port: int) -> None:
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(post(stream))
                data = b""
                while not data.endswith(b"0\r\n\r\n" if stream else b"}"):
                    data += connection.recv(1 << 16)

    async with rig(middleware=middleware) as r:
        await asyncio.gather(*(asyncio.to_thread(ask, r.port) for _ in range(16)))
        await r.until(lambda: r.gateway.num_active == 0)
    assert errors(caplog) == []
