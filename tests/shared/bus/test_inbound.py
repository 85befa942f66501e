"""Links of live members are always remembered, for any number of other connections."""

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from blockyard.shared.bus.frames import FrameReader, Malformed
from blockyard.shared.bus.inbound import MAX_UNLISTED, InboundLinks
from blockyard.shared.bus.sockets import Sockets
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import PROTOCOL_VERSION, Cancel, Hello, Member, Role

ME = Member("me", Role.DETOKENIZER, 1, "ipc:///me")


class FakeRouter:
    """A ROUTER with ROUTER_MANDATORY: `connected` routes can be sent to, others raise EHOSTUNREACH."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[bytes, ...]] = deque()
        self.connected: set[bytes] = set()
        self.sent: list[tuple[bytes, ...]] = []

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self.waiting else 0

    def recv_multipart(self, flags: int) -> tuple[bytes, ...]:
        if not self.waiting:
            raise zmq.Again
        return self.waiting.popleft()

    def send_multipart(self, parts: tuple[bytes, ...], flags: int) -> None:
        if parts[0] not in self.connected:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append(parts)


class Peers:
    """InboundLinks with its membership list, and peers that connect to it."""

    def __init__(self) -> None:
        self.router = FakeRouter()
        self.listed: set[int] = set()
        self.malformed = Malformed()
        self.opened_again: list[int] = []
        self.links = InboundLinks(
            self.router, ME, FrameReader(Cancel | Hello, self.malformed), self.listed, self._again
        )  # type: ignore[arg-type]

    def _again(self, incarnation: int) -> list[Any]:
        self.opened_again.append(incarnation)
        return []

    def connect(self, incarnation: int, route: bytes) -> None:
        self.router.connected.add(route)
        self.give(route, Hello(PROTOCOL_VERSION, incarnation, "peer", ME.incarnation))

    def give(self, route: bytes, frame: Any) -> list[tuple[int, Any]]:
        self.router.waiting.append((route, msgspec.msgpack.encode(frame)))
        events: list[tuple[int, Any]] = []
        self.links.receive(events, 10)
        return events


@pytest.fixture
def peers() -> Peers:
    return Peers()


def test_a_member_is_heard_and_answered_after_any_number_of_other_links(peers: Peers) -> None:
    peers.listed |= {10, 11}
    peers.connect(10, b"ten")
    peers.connect(11, b"eleven")
    for stranger in range(5 * MAX_UNLISTED):
        peers.connect(1000 + stranger, b"s%d" % stranger)
    for incarnation, route in ((10, b"ten"), (11, b"eleven")):
        assert peers.give(route, Cancel("r", 1)) == [(incarnation, Cancel("r", 1))]
        assert peers.links.send(incarnation, b"answer")
    assert peers.malformed.total == 0
    answered = [stranger for stranger in range(5 * MAX_UNLISTED) if peers.links.send(1000 + stranger, b"answer")]
    assert len(answered) <= 2 * MAX_UNLISTED


def test_more_members_than_unlisted_links_are_kept_are_all_heard(peers: Peers) -> None:
    members = range(10, 10 + 3 * MAX_UNLISTED)
    peers.listed |= set(members)
    for incarnation in members:
        peers.connect(incarnation, b"m%d" % incarnation)
    assert all(peers.links.send(incarnation, b"answer") for incarnation in members)


def test_a_peer_that_is_not_listed_yet_outlives_older_strangers(peers: Peers) -> None:
    """Its Hello may arrive before the registry's list names it."""
    newest = 2 * MAX_UNLISTED + 1000
    for stranger in range(1000, newest + 1):
        peers.connect(stranger, b"s%d" % stranger)
    assert peers.give(b"s%d" % newest, Cancel("r", 1)) == [(newest, Cancel("r", 1))]
    assert peers.links.send(newest, b"answer")
    assert not peers.give(b"s1000", Cancel("r", 1))
    assert peers.malformed.total == 1


def test_a_link_opened_anew_replaces_the_old_one(peers: Peers) -> None:
    peers.listed.add(10)
    for i in range(3 * MAX_UNLISTED):
        peers.connect(10, b"r%d" % i)
    assert len(peers.opened_again) == 3 * MAX_UNLISTED - 1
    heard = [i for i in range(3 * MAX_UNLISTED) if peers.give(b"r%d" % i, Cancel("r", 1))]
    assert len(heard) <= 2 * MAX_UNLISTED
    assert peers.links.send(10, b"answer")
    assert peers.router.sent[-1] == (b"r%d" % (3 * MAX_UNLISTED - 1), b"answer")


def test_a_dead_link_is_forgotten(tmp_path: Path) -> None:
    """On real sockets: the peer closes its link, and the first answer after that fails."""
    sockets = Sockets(BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}"))
    bound = sockets.bind_router()
    again: list[int] = []
    links = InboundLinks(
        bound.socket, ME, FrameReader(Cancel | Hello, Malformed()), {10}, lambda peer: again.append(peer) or []
    )  # type: ignore[func-returns-value]
    hello = msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, 10, "peer", ME.incarnation))
    try:
        for _ in range(2):
            dealer = sockets.connect_dealer(bound.endpoint, b"m")
            dealer.send(hello)
            assert bound.socket.poll(5000)
            links.receive([], 10)
            assert dealer.poll(5000)
            assert links.send(10, b"answer")
            dealer.close(0)
            for _ in range(500):
                if not links.send(10, b"answer"):
                    break
                bound.socket.poll(10)
            assert not links.send(10, b"answer")
        assert not again  # the second link replaced none: the first was known to be dead
    finally:
        bound.socket.close(0)
        sockets.close()
