"""A registry that stands still, or whose connections are dead, keeps its list and hears all members again."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from blockyard.shared.bus import registry_link
from blockyard.shared.bus.curve import PUBLIC_NAME, SECRET_NAME, write_keys
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.member_list import Gone
from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.bus.sockets import Sockets, readable, receive_routed, send_frame
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.registry import RegistryConfig
from blockyard.shared.messages import Announce, Cancel, Member, Members, Role

from .test_links import pair, until

encode = msgspec.msgpack.encode


def dial(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, route: bytes) -> "zmq.Socket[bytes]":
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, route)
    dealer.connect(endpoint)
    return dealer


def announce(name: str) -> bytes:
    return encode(Announce(Member(name, Role.DETOKENIZER, 1, "ipc:///x")))


def heard(server: RegistrySocket, name: str, limit_s: float = 2.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if any(isinstance(f, Announce) and f.member.name == name for f in server.poll(0.05)):
            return True
    return False


def test_a_connection_that_returns_under_its_routing_id_replaces_the_dead_one(tmp_path: Path) -> None:
    """Dealers of libzmq do so after silence. The registry may not know yet that the first connection is dead."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    server = RegistrySocket(bus)
    with zmq.Context() as context, dial(context, bus.registry, b"m-1") as first:
        first.send(announce("first"))
        assert heard(server, "first")
        with dial(context, bus.registry, b"m-1") as second:
            second.send(announce("second"))
            assert heard(server, "second")
    server.close()


def test_on_links_with_a_hello_nobody_takes_over_a_routing_id(tmp_path: Path) -> None:
    """The frames of a new connection would count as those of the member that sent the Hello, or the ticket."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    sockets = Sockets(bus)
    bound = sockets.bind_router()
    with zmq.Context() as context, dial(context, bound.endpoint, b"m-1") as first:
        first.send(b"hello")
        assert bound.socket.poll(2000) and bound.socket.recv_multipart() == [b"m-1", b"hello"]
        with dial(context, bound.endpoint, b"m-1") as second:
            second.send(b"of a thief")
            assert not bound.socket.poll(300)
            bound.socket.send_multipart([b"m-1", b"answer"])
            assert first.poll(2000) and not second.poll(0)
    bound.socket.close(0)
    sockets.close()


def test_a_stranger_without_the_key_cannot_take_over_a_members_link(tmp_path: Path) -> None:
    write_keys(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        registry_at = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    public, secret = str(tmp_path / PUBLIC_NAME), str(tmp_path / SECRET_NAME)
    bus = BusConfig(registry=registry_at, bind="tcp://127.0.0.1", curve_public=public, curve_secret=secret)
    server, sockets = RegistrySocket(bus), Sockets(bus)
    member = sockets.connect_dealer(bus.registry, b"m")
    route = member.getsockopt(zmq.ROUTING_ID)
    member.send(announce("member"))
    assert heard(server, "member")
    with zmq.Context() as context:
        thief = context.socket(zmq.DEALER)
        thief.setsockopt(zmq.LINGER, 0)
        thief.setsockopt(zmq.ROUTING_ID, route)
        thief.curve_serverkey = (tmp_path / PUBLIC_NAME).read_bytes().strip()
        thief.curve_publickey, thief.curve_secretkey = zmq.curve_keypair()
        with thief:
            thief.connect(bus.registry)
            thief.send(announce("thief"))
            assert not heard(server, "thief", 0.5)
            member.send(announce("member"))
            assert heard(server, "member")
    member.close(0)
    sockets.close()
    server.close()


def test_a_member_that_hears_no_list_dials_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a connection that carries nothing, which nothing reports."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    monkeypatch.setattr(registry_link, "DEAF_S", 1.0)
    sockets = Sockets(bus)
    server = sockets.bind_router(bus.registry).socket
    with Links("a", Role.SCHEDULER, bus, Cancel) as a:
        routes: list[bytes] = []
        answers, stays_until = True, time.monotonic() + 1.5

        def hears() -> list[bytes]:
            while readable(server):
                route, _ = receive_routed(server)
                if route not in routes:
                    routes.append(route)
                if answers:
                    send_frame(server, encode(Members(True, [a.me])), route)
            return routes

        until(lambda: bool(hears()) and time.monotonic() > stays_until, a)
        assert len(routes) == 1, "the registry repeats its list"
        answers = False
        until(lambda: len(hears()) == 2, a)
        answers, stays_until = True, time.monotonic() + 1.5
        until(lambda: bool(hears()) and time.monotonic() > stays_until, a)
        assert len(routes) == 2
    server.close(0)
    sockets.close()


@contextmanager
def message_bus(bus: BusConfig, folder: Path, dead_after_s: float) -> Iterator["subprocess.Popen[bytes]"]:
    path = folder / "settings.json"
    process = ProcessConfig(name="message_bus", bus=bus)
    path.write_bytes(msgspec.json.encode(RegistryConfig(process=process, dead_after_s=dead_after_s)))
    command = [sys.executable, "-P", "-m", "blockyard.services.message_bus", str(path)]
    with subprocess.Popen(command) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_registry_that_stood_still_declares_nobody_dead(tmp_path: Path) -> None:
    """It has heard nobody for longer than the timeout of a member."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    with message_bus(bus, tmp_path, dead_after_s=1.5) as process, ExitStack() as stack:
        members = [stack.enter_context(links) for links in pair(bus)]
        until(lambda: all(m.members for m in members), *members)
        for _ in range(2):
            seen: list = []
            process.send_signal(signal.SIGSTOP)
            wakes = time.monotonic() + 2.0
            until(lambda: time.monotonic() > wakes, *members, seen=seen)  # noqa: B023
            process.send_signal(signal.SIGCONT)
            awake = time.monotonic()
            with Links(f"joins {awake}", Role.DETOKENIZER, bus, Cancel) as other:  # when the registry works again
                name = other.me.incarnation
                until(lambda: all(name in m.members for m in members), *members, other, seen=seen)  # noqa: B023
            until(lambda: time.monotonic() > awake + 0.5, *members, seen=seen)  # noqa: B023
            assert not any(isinstance(event, Gone) for _, _, event in seen)
