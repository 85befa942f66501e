"""The bound on a gateway's connections, and which connection is closed at the bound. Real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from blockyard.services.api_gateway.http import connections
from blockyard.services.api_gateway.http.connections import MOST_BY_DEFAULT, SURPLUS, bound
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Role

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def opened(r: Any, number: int) -> AsyncIterator[list[Pair]]:
    pairs = [await asyncio.open_connection("127.0.0.1", r.port) for _ in range(number)]
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()


async def is_closed(pair: Pair, wait_s: float = 0.1) -> bool:
    """True if the server closed the connection without an answer."""
    try:
        async with asyncio.timeout(wait_s):
            return await pair[0].read(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


async def status(pair: Pair) -> int:
    pair[1].write(LIVE)
    async with asyncio.timeout(5):
        head = await pair[0].readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
        await pair[0].readexactly(int(length.split()[1]))
    return int(head.split()[1])


async def test_the_longest_idle_connection_is_closed_for_a_new_one(rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.0)
    async with rig(max_connections=4) as r, opened(r, 4) as old:
        assert [await status(pair) for pair in old] == [200] * 4
        assert await status(old[0]) == 200  # now the second is the longest idle
        async with opened(r, 2) as new:
            assert [await status(pair) for pair in new] == [200, 200]
            assert [await is_closed(pair) for pair in old] == [False, True, True, False]


async def test_a_busy_connection_is_not_closed_and_connections_above_the_bound_get_a_503(rig) -> None:
    async with rig(max_connections=3) as r:
        r.ring.silent.add(Role.SCHEDULER)
        body = {"prompt": "x", "stream": True}
        async with aiohttp.ClientSession(r.url) as http:
            asked = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
            await r.until(lambda: r.gateway.num_active == 3)
            async with opened(r, SURPLUS) as surplus:
                assert {await status(pair) for pair in surplus} == {503}
                assert await is_closed(surplus[0])
            await asyncio.sleep(0.05)
            async with opened(r, SURPLUS + 5) as surplus:
                assert [await is_closed(pair) for pair in surplus[SURPLUS:]] == [True] * 5
            assert not any(task.done() for task in asked)
            for task in asked:
                task.cancel()
        await r.until(lambda: r.gateway.num_active == 0)
        async with r.http.get("/live") as response:
            assert response.status == 200


async def test_a_connection_just_opened_is_not_closed_for_the_next(rig) -> None:
    async with rig(max_connections=2) as r, opened(r, 2) as old, opened(r, 1) as new:
        assert await status(new[0]) == 503
        assert [await status(pair) for pair in old] == [200, 200]


def test_the_bound_follows_the_limit_on_open_files() -> None:
    assert bound(None, 1024) == 1024 - 256 - SURPLUS
    assert bound(None, 128) == 64 - SURPLUS
    assert bound(None, 20) == 1
    assert bound(None, 2**20) == MOST_BY_DEFAULT
    assert bound(30_000, 2**20) == 30_000
    with pytest.raises(ConfigError, match=r"--max-connections 30000: the limit of 20000 open files .* allows 18718"):
        bound(30_000, 20_000)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /live HTTP/9.x\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_get_a_json_error_and_the_server_goes_on(rig, sent: bytes) -> None:
    async with rig() as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(sent)
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        async with r.http.get("/live") as response:
            assert response.status == 200
    assert head.split()[1] == b"400" and b"Content-Type: application/json" in head
    error = msgspec.json.decode(body)["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
    assert error["message"].startswith("the request is not valid HTTP: ") and "\n" not in error["message"]
