"""A member that answers a Hello with anything else than its own costs the member that dialled a log line."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from rig import registry

from blockyard.shared.bus import outbound
from blockyard.shared.bus.member_list import REFUSED_S, Gone, MemberList
from blockyard.shared.bus.sockets import Sockets, receive_routed
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import PROTOCOL_VERSION, Announce, Cancel, Hello, Member, Members, Role

from .test_links import frames, pair, until

encode = msgspec.msgpack.encode
PEER = 77
ANSWERS: dict[str, list[bytes]] = {
    "an older version": [encode(Hello(PROTOCOL_VERSION - 1, PEER, "old"))],
    "a newer version, twice": [encode(Hello(PROTOCOL_VERSION + 1, PEER, "new"))] * 2,
    "another incarnation": [encode(Hello(PROTOCOL_VERSION, PEER + 1, "other"))],
    "another incarnation after the right one": [encode(Hello(PROTOCOL_VERSION, i, "peer")) for i in (PEER, PEER + 1)],
    "a frame before a Hello": [encode(Cancel("r", 1))],
    "no frame": [b"\xc1", b""],
}


@contextmanager
def odd_member(bus: BusConfig, answers: list[bytes]) -> Iterator[list[int]]:
    """A thread announces a member and gives these answers to each frame. Yields the number of frames it got, one an
    element."""
    sockets, stopped, got = Sockets(bus), threading.Event(), list[int]()
    bound = sockets.bind_router()
    link = sockets.connect_dealer(bus.registry, b"m")

    def serve() -> None:
        while not stopped.is_set():
            link.send(encode(Announce(Member("odd", Role.GPU_WORKER, PEER, bound.endpoint, ready=True))))
            until_s = time.monotonic() + 0.2
            while bound.socket.poll(max(0, int(1000 * (until_s - time.monotonic())))):
                route, _ = receive_routed(bound.socket)
                got.append(1)
                with contextlib.suppress(zmq.ZMQError):  # the link is closed again
                    for answer in answers:
                        bound.socket.send_multipart((route, answer))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield got
    finally:
        stopped.set()
        thread.join()
        bound.socket.close(0)
        link.close(0)
        sockets.close()


@pytest.mark.parametrize("kind", ANSWERS)
def test_whatever_answers_a_hello_the_member_that_dialled_lives_on(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other links carry frames meanwhile."""
    monkeypatch.setattr(outbound, "HELLO_S", 0.3)
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    seen: list = []
    with registry(bus), odd_member(bus, ANSWERS[kind]) as got:
        a, b = pair(bus)
        with a, b, caplog.at_level(logging.WARNING):
            until(lambda: len(a.members) == 2 and bool(b.members), a, b)
            a.send(PEER, Cancel("odd", 1))
            until(lambda: any(isinstance(e, Gone) and e.member.name == "odd" for _, _, e in seen), a, b, seen=seen)
            for i in range(20):
                a.send(PEER, Cancel("odd", i))
                a.send(b.me.incarnation, Cancel("r", i))
                until(lambda i=i: len(frames(seen, "b")) == i + 1, a, b, seen=seen)  # type: ignore[misc]
            assert got
    lines = [r.message for r in caplog.records if "dropped a malformed frame" in r.message]
    assert len(lines) == 1, lines


def test_a_member_of_another_version_is_not_reported_as_dead(tmp_path: Path) -> None:
    """Members of its own version have good links to it."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    seen: list = []
    with registry(bus), odd_member(bus, ANSWERS["an older version"]):
        a, b = pair(bus)
        with a, b:
            until(lambda: len(a.members) == 2 and len(b.members) == 2, a, b)
            a.send(PEER, Cancel("odd", 1))
            until(lambda: PEER not in a.members, a, b, seen=seen)
            lasts_until = time.monotonic() + 1.0
            until(lambda: time.monotonic() > lasts_until, a, b, seen=seen)
            assert PEER not in a.members and PEER in b.members
            assert not any(to == "b" and isinstance(e, Gone) for to, _, e in seen)


def test_a_refused_member_is_tried_again_later() -> None:
    peer = Member("odd", Role.GPU_WORKER, PEER, "ipc:///odd")
    listed, members = Members(True, [peer]), MemberList(own=1)
    members.push(listed, 0.0)
    assert [type(e) for e in members.link_broke(PEER, 0.0, REFUSED_S)] == [Gone]
    assert not members.push(listed, REFUSED_S - 0.1)
    assert [e.member for e in members.push(listed, REFUSED_S + 0.1)] == [peer]
