import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import deployment
from tcp_addresses import free_port

from blockyard.services.launcher import ports
from blockyard.shared.errors import ConfigError


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another ring's gateway
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "", "localhost"])
def test_a_taken_port_is_one_line(taken: int, host: str) -> None:
    with pytest.raises(ConfigError, match=f"^port {taken} is in use; choose another with --port$"):
        ports.check_free(host, taken, "--port")


@pytest.mark.parametrize("host", ["127.0.0.1", "", "localhost"])
def test_a_free_port_passes(host: str) -> None:
    ports.check_free(host, free_port(), "--port")


def test_a_unix_socket_without_a_listener_is_free(tmp_path: Path) -> None:
    path = tmp_path / "s"
    flags = ("--uds", str(path), "--port", "1")  # a privileged port, which is not probed
    ring = deployment(tmp_path, *flags)
    ports.check(ring.gateways)
    assert ports.url(ring.gateways[0]) == f"unix:{path}"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        with pytest.raises(ConfigError, match=f"--uds {path}: another server uses it"):
            ports.check(ring.gateways)
    ports.check(ring.gateways)
    path.unlink()
    path.write_text("a file")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        ports.check(ring.gateways)
    with pytest.raises(ConfigError, match="is not a folder"):
        ports.check(deployment(tmp_path, "--uds", str(tmp_path / "no" / "s")).gateways)


def test_a_host_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.7: Cannot assign requested address"):
        ports.check_free("203.0.113.7", free_port(), "--port")


def test_metrics_ports_are_checked_too(tmp_path: Path, taken: int) -> None:
    flags = ("--host", "127.0.0.1", "--port", str(free_port()), "--metrics-port", str(taken))
    with pytest.raises(ConfigError, match="choose another with --metrics-port"):
        ports.check(deployment(tmp_path, *flags).gateways)


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (["--port", "9"], "http://localhost:9"),
        (["--port", "9", "--host", "0.0.0.0", "--root-path", "/llm"], "http://localhost:9/llm"),
        (["--port", "9", "--root-path", "llm/v2/"], "http://localhost:9/llm/v2"),
        (["--port", "9", "--host", "::1"], "http://[::1]:9"),
        (["--port", "9", "--host", "10.0.0.1"], "http://10.0.0.1:9"),
    ],
)
def test_urls(tmp_path: Path, flags: list[str], url: str) -> None:
    assert ports.url(deployment(tmp_path, *flags).gateways[0]) == url


@pytest.mark.parametrize("host", ["127.0.0.1", "", "localhost"])
def test_a_port_is_taken_from_the_check_on(tmp_path: Path, host: str) -> None:
    """The first ring's gateways may bind it seconds later; a second launcher is refused at once."""
    port = free_port()
    first = deployment(tmp_path, "--port", str(port), *(["--host", host] if host else []), "--api-gateways", "2")
    with ports.reserved(first.gateways):
        with pytest.raises(ConfigError, match=f"^port {port} is in use"), ports.reserved(first.gateways):
            pass
        asyncio.run(serve_twice(host, port))
    with ports.reserved(first.gateways):  # also while connections of the first ring's gateways are in TIME_WAIT
        with pytest.raises(ConfigError, match=f"^port {port} is in use"), ports.reserved(first.gateways):
            pass
        asyncio.run(serve_twice(host, port))


async def serve_twice(host: str, port: int) -> None:
    """Two gateways listen on a held port, and every connection reaches one of them."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        writer.close()
        await writer.wait_closed()

    servers = [await asyncio.start_server(answer, host or None, port, reuse_port=True) for _ in range(2)]
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"x"
        writer.close()
        await writer.wait_closed()
    for server in servers:
        server.close()
        await server.wait_closed()


def test_many_launchers_at_once_get_a_port_once(tmp_path: Path) -> None:
    ring = deployment(tmp_path, "--host", "127.0.0.1", "--port", str(free_port()))
    got: list[bool] = []
    everyone = threading.Barrier(8)

    def launch() -> None:
        everyone.wait()
        try:
            with ports.reserved(ring.gateways):
                got.append(True)
                everyone.wait()
        except ConfigError:
            got.append(False)
            everyone.wait()

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]
