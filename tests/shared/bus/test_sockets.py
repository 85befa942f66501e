"""Memory that an unauthenticated peer can make a process hold, and frames larger than one part of a message."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from rig import registry
from tcp_addresses import tcp_bus

from blockyard.shared.bus.links import Links
from blockyard.shared.bus.registry_socket import RegistrySocket, registry_address
from blockyard.shared.bus.sockets import PART_BYTES, Sockets, receive_routed, send_frame
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Detokenize, Detokenized, Member, Members, Role
from blockyard.shared.process.service_main import rss_bytes

from .test_links import until

MIB = 2**20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_COMMAND, LONG_MESSAGE = 6, 2  # flags of a ZMTP 3 frame


@pytest.fixture
def tcp(tmp_path: Path) -> BusConfig:
    return tcp_bus(tmp_path / "keys")


@contextlib.contextmanager
def a_member(bus: BusConfig) -> Iterator[str]:
    with Links("b", Role.SCHEDULER, bus, Detokenize) as links:
        yield links.me.endpoint


@contextlib.contextmanager
def a_registry(bus: BusConfig) -> Iterator[str]:
    server = RegistrySocket(bus)
    try:
        yield bus.registry
    finally:
        server.close()


def taken_of(endpoint: str, flags: int, size: int) -> int:
    """Returns the bytes of a frame that a peer without a key could send before the connection was closed."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(GREETING + struct.pack(">BQ", flags, size))
        chunk, sent = bytes(256 * 1024), 0
        try:
            while sent < size:
                sent += stranger.send(chunk)
        except OSError:
            pass
        return sent


@pytest.mark.parametrize("flags", [LONG_COMMAND, LONG_MESSAGE])
@pytest.mark.parametrize("listener", [a_member, a_registry])
def test_a_stranger_cannot_make_a_process_hold_its_bytes(
    tcp: BusConfig, listener: Callable[[BusConfig], contextlib.AbstractContextManager[str]], flags: int
) -> None:
    with listener(tcp) as endpoint:
        before = rss_bytes()
        assert sum(taken_of(endpoint, flags, 64 * MIB) for _ in range(4)) < 64 * MIB
        assert rss_bytes() - before < 24 * MIB


def test_a_connection_that_does_not_authenticate_is_closed(tcp: BusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard.shared.bus.sockets.HANDSHAKE_MS", 200)
    with a_member(tcp) as endpoint:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(GREETING)
            began = time.monotonic()
            while stranger.recv(4096):
                pass
            assert time.monotonic() - began < 4


@pytest.mark.parametrize("size", [0, PART_BYTES - 100, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 5 * MIB + 3])
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_frame_of_any_size_arrives_in_both_directions(tcp: BusConfig, tmp_path: Path, kind: str, size: int) -> None:
    bus = tcp if kind == "tcp" else BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    accepts = Detokenize | Detokenized
    asked = Detokenize("r", "m", bytes(i % 251 for i in range(1000)) * (size // 1000) + b"x" * (size % 1000))
    answer = Detokenized("r", "y" * size)
    with registry(bus), Links("a", Role.SCHEDULER, bus, accepts) as a, Links("b", Role.DETOKENIZER, bus, accepts) as b:
        until(lambda: bool(a.members), a, b)
        seen: list = []
        for frame in (asked, Detokenize("after", "m", b"")):
            assert a.send(b.me.incarnation, frame)
        until(lambda: ("b", a.me.incarnation, Detokenize("after", "m", b"")) in seen, a, b, seen=seen)
        assert ("b", a.me.incarnation, asked) in seen
        for back in (answer, Detokenized("after", "")):
            assert b.answer(a.me.incarnation, back)
        until(lambda: ("a", b.me.incarnation, Detokenized("after", "")) in seen, a, b, seen=seen)
        assert ("a", b.me.incarnation, answer) in seen
        assert a.malformed_total == b.malformed_total == 0


def test_a_membership_list_of_any_size_arrives(tmp_path: Path) -> None:
    """An entry with many notes, and so both an announcement and a list, is larger than a part."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    notes = [f"note {i} " * 20 for i in range(2000)]
    assert len(msgspec.msgpack.encode(Members(True, [Member("a", Role.SCHEDULER, 1, "", notes=notes)]))) > PART_BYTES
    with (
        registry(bus),
        Links("a", Role.SCHEDULER, bus, Detokenize) as a,
        Links("b", Role.LAUNCHER, bus, Detokenize) as b,
    ):
        a.update(notes=notes)
        until(lambda: any(m.notes == notes for m in b.members.values()), a, b)


def test_a_frame_that_cannot_be_queued_is_sent_in_no_part(tmp_path: Path) -> None:
    """A link of three messages: the fourth frame is refused whole, the three arrive whole."""
    sockets = Sockets(BusConfig(registry=f"ipc://{tmp_path}/r", bind=f"ipc://{tmp_path}", link_frames=3))
    nobody = sockets.connect_dealer(f"ipc://{tmp_path}/nobody", b"m")
    try:
        frames = [bytes([i]) * (3 * PART_BYTES) for i in range(4)]
        queued = 0
        with contextlib.suppress(zmq.Again):
            for frame in frames:
                send_frame(nobody, frame)
                queued += 1
        assert queued == 3
        late = sockets.bind_router(f"ipc://{tmp_path}/nobody").socket
        got = []
        while len(got) < 3:
            assert late.poll(5000)
            got.append(receive_routed(late)[1])
        assert got == frames[:3]
        assert not late.poll(100)
        late.close(0)
    finally:
        nobody.close(0)
        sockets.close()


@pytest.mark.parametrize(
    ("registry_at", "bind", "bound"),
    [
        ("tcp://127.0.0.1:5700", "tcp://0.0.0.0", "tcp://127.0.0.1:5700"),
        ("tcp://10.1.2.3:5700", "tcp://0.0.0.0", "tcp://10.1.2.3:5700"),
        ("tcp://0.0.0.0:5700", "tcp://127.0.0.1", "tcp://0.0.0.0:5700"),
        ("tcp://localhost:5700", "tcp://0.0.0.0", "tcp://127.0.0.1:5700"),
        ("tcp://message-bus:5700", "tcp://0.0.0.0", "tcp://0.0.0.0:5700"),
        ("tcp://message-bus:5700", "tcp://10.1.2.3", "tcp://10.1.2.3:5700"),
        ("ipc:///run/blockyard/message-bus", "ipc:///run/blockyard", "ipc:///run/blockyard/message-bus"),
    ],
)
def test_the_registry_binds_the_address_it_was_given(registry_at: str, bind: str, bound: str) -> None:
    assert registry_address(BusConfig(registry=registry_at, bind=bind)) == bound


@pytest.mark.parametrize("bind", ["tcp://192.0.2.1", "tcp://no-such-name", "ipc:///no-such-folder"])
def test_an_address_that_this_machine_does_not_have_is_named(bind: str, tmp_path: Path) -> None:
    sockets = Sockets(BusConfig(registry=f"ipc://{tmp_path}/bus", bind=bind))
    with contextlib.closing(sockets), pytest.raises(ConfigError, match=f"^--bind {bind}: "):
        sockets.bind_router()


def test_a_registry_on_the_loopback_address_is_not_reached_at_another_one(tcp: BusConfig) -> None:
    port = int(tcp.registry.rpartition(":")[2])
    bus = msgspec.structs.replace(tcp, bind="tcp://0.0.0.0")
    with a_registry(bus):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
