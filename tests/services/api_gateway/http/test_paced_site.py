"""Listening sockets that accept a few connections at a time. Real sockets."""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from blockyard.services.api_gateway.http import paced_site
from blockyard.services.api_gateway.http.paced_site import ACCEPTS, PacedSite

GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def serving(at_path: Path | None = None) -> AsyncIterator[tuple[PacedSite, web.AppRunner]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="here")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = PacedSite.at_port(runner, "127.0.0.1", 0) if at_path is None else PacedSite.at_path(runner, str(at_path))
    await site.start()
    try:
        yield site, runner
    finally:
        await runner.cleanup()


def connected(runner: web.AppRunner, number: int) -> list[socket.socket]:
    return [socket.create_connection(runner.addresses[0][:2]) for _ in range(number)]


async def answer_of(client: socket.socket) -> bytes:
    client.setblocking(False)
    loop, data = asyncio.get_running_loop(), b""
    await loop.sock_sendall(client, GET)
    while piece := await loop.sock_recv(client, 4096):
        data += piece
    return data


async def test_few_connections_are_accepted_in_an_iteration() -> None:
    async with serving() as (_, runner):
        assert runner.server is not None
        clients, counts = connected(runner, 40), [0]
        async with asyncio.timeout(5):
            while counts[-1] < len(clients):
                await asyncio.sleep(0)
                counts.append(len(runner.server.connections))
        assert max(b - a for a, b in pairwise(counts)) <= ACCEPTS
        for answer in await asyncio.gather(*map(answer_of, clients)):
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"here")
        for client in clients:
            client.close()


async def test_a_stopped_site_accepts_nothing_and_frees_its_port() -> None:
    async with serving() as (site, runner):
        host, port = runner.addresses[0][:2]
        await site.stop()
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
        again = PacedSite.at_port(runner, host, port)
        await again.start()
        (client,) = connected(runner, 1)
        assert (await answer_of(client)).startswith(b"HTTP/1.1 200")
        client.close()


async def test_a_unix_socket_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path / "http.sock") as (site, _):
        assert site.name == f"socket {tmp_path / 'http.sock'}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "http.sock"))
            assert (await answer_of(client)).startswith(b"HTTP/1.1 200")


async def test_without_free_descriptors_a_site_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_site, "PAUSE_S", 0.01)
    accept, failed = socket.socket.accept, []

    def full(listener: socket.socket) -> tuple[socket.socket, object]:
        if len(failed) < 2:
            failed.append(listener)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", full)
    async with serving() as (_, runner):
        (client,) = connected(runner, 1)
        async with asyncio.timeout(5):
            assert (await answer_of(client)).startswith(b"HTTP/1.1 200")
        client.close()
    assert len(failed) == 2


async def test_a_client_that_speaks_no_tls_harms_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, runner):
        site = PacedSite.at_port(runner, "127.0.0.1", 0, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        await site.start()
        client = socket.create_connection(runner.addresses[1][:2])
        with contextlib.suppress(ConnectionError):
            assert b"here" not in await answer_of(client)
        client.close()
        (other,) = connected(runner, 1)
        assert (await answer_of(other)).startswith(b"HTTP/1.1 200")
        other.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
