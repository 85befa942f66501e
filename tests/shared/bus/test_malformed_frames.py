"""Malformed bytes end no process: every union, and every kind of socket that decodes."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import registry

from blockyard.shared import messages
from blockyard.shared.bus import ring_query
from blockyard.shared.bus.frames import LINES_A_MINUTE, FrameReader, Malformed
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import PROTOCOL_VERSION, Announce, Cancel, Hello, Member, Members, Role

from ..test_messages import sample
from .test_links import Accepts, frames, pair, until

UNIONS: dict[str, Any] = {
    "registry": messages.RegistryIn,
    "list": messages.Members,
    "launcher": Hello,
    "gateway": messages.GatewayIn | Hello,
    "tokenizer": messages.TokenizerIn | Hello,
    "scheduler": messages.SchedulerIn | Hello,
    "detokenizer": messages.DetokenizerIn | Hello,
    "worker": messages.WorkerIn | Hello,
}
NOT_UTF8 = b"\x92\xa1\xff\xa1\xff"
NOT_UTF8_INSIDE = b"\x93\xa6Cancel\xa1\xff\x01"
DEEP_IN_A_NEW_FIELD = b"\x94\xa6Cancel\xa1r\x01" + b"\x91" * 50_000 + b"\xc0"
BAD = [NOT_UTF8, NOT_UTF8_INSIDE, DEEP_IN_A_NEW_FIELD, b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91\xa3Bad"]


@st.composite
def changed_frames(draw: st.DrawFn, union: Any) -> bytes:
    """A good frame of the union with some bytes replaced, added or cut off."""
    kind = draw(st.sampled_from(get_args(union) or (union,)))
    data = bytearray(msgspec.msgpack.encode(sample(kind)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@pytest.mark.parametrize("name", UNIONS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_are_a_frame_or_counted(name: str, data: st.DataObject) -> None:
    malformed = Malformed()
    reader: FrameReader[Any] = FrameReader(UNIONS[name], malformed)
    wire = data.draw(st.one_of(st.binary(max_size=64), changed_frames(UNIONS[name]), st.sampled_from(BAD)))
    frame = reader.read(wire, 1)
    assert (frame is None) == (malformed.total == 1)


def noise(count: int) -> list[bytes]:
    """Returns `BAD` and changed frames of all unions; none of them decodes in any union."""
    rng = random.Random(7)
    decoders = [msgspec.msgpack.Decoder(union).decode for union in UNIONS.values()]
    wires = list(BAD)
    while len(wires) < count:
        union = rng.choice(list(UNIONS.values()))
        data = bytearray(msgspec.msgpack.encode(sample(rng.choice(get_args(union) or (union,)))))
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if not any(_decodes(decode, bytes(data)) for decode in decoders):
            wires.append(bytes(data))
    return wires


def _decodes(decode: Callable[[bytes], object], wire: bytes) -> bool:
    try:
        decode(wire)
    except (ValueError, RecursionError):
        return False
    return True


NOISE = noise(300)


@pytest.fixture
def bus(tmp_path: Path) -> BusConfig:
    return BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")


@contextmanager
def raw(kind: int) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        yield sock


def test_links_that_peers_opened(bus: BusConfig) -> None:
    with registry(bus), Links("b", Role.DETOKENIZER, bus, Accepts) as b, raw(zmq.DEALER) as peer:
        peer.connect(b.me.endpoint)
        peer.send(NOT_UTF8)  # before its Hello
        peer.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, 77, "raw", to=b.me.incarnation)))
        for wire in NOISE:
            peer.send(wire)
        peer.send(msgspec.msgpack.encode(Cancel("good", 1)))
        seen: list = []
        until(lambda: bool(frames(seen, "b")), b, seen=seen)
        assert b.malformed_total == 1 + len(NOISE)


def test_links_this_process_opened(bus: BusConfig, tmp_path: Path) -> None:
    """A peer that answers with noise, and a peer with an endpoint that libzmq rejects."""
    with registry(bus), Links("a", Role.SCHEDULER, bus, Accepts) as a, raw(zmq.ROUTER) as peer, raw(zmq.DEALER) as told:
        peer.bind(f"ipc://{tmp_path}/peer")
        told.connect(bus.registry)
        told.send(msgspec.msgpack.encode(Announce(Member("p", Role.DETOKENIZER, 77, f"ipc://{tmp_path}/peer"))))
        told.send(msgspec.msgpack.encode(Announce(Member("q", Role.DETOKENIZER, 78, "carrier-pigeon://coop"))))
        until(lambda: {77, 78} <= a.members.keys(), a)
        assert not a.send(78, Cancel("r", 1))
        assert a.send(77, Cancel("r", 1))
        route, _ = peer.recv_multipart()
        for wire in (
            msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, 77, "p")),
            *NOISE,
            msgspec.msgpack.encode(Cancel("good", 1)),
        ):
            peer.send_multipart((route, wire))
        seen: list = []
        until(lambda: bool(frames(seen, "a")), a, seen=seen)
        assert a.malformed_total == 1 + len(NOISE)


def test_the_link_to_the_registry(bus: BusConfig) -> None:
    with raw(zmq.ROUTER) as bad_registry:
        bad_registry.bind(bus.registry)
        with Links("a", Role.SCHEDULER, bus, Accepts) as a:
            until(lambda: bool(bad_registry.poll(0)), a)
            route, _ = bad_registry.recv_multipart()
            news = Members(True, [Member("p", Role.DETOKENIZER, 77, "ipc:///nowhere")])
            for wire in (*NOISE, msgspec.msgpack.encode(news)):
                bad_registry.send_multipart((route, wire))
            until(lambda: 77 in a.members, a)
            assert a.malformed_total == len(NOISE)


def test_the_registry(bus: BusConfig) -> None:
    server = RegistrySocket(bus)
    try:
        with raw(zmq.DEALER) as member:
            member.connect(bus.registry)
            for wire in (*NOISE, msgspec.msgpack.encode(Announce(Member("p", Role.DETOKENIZER, 77, "ipc:///x")))):
                member.send(wire)
            heard: list = []
            while not heard:
                heard += server.poll(5.0)
            assert heard == [Announce(Member("p", Role.DETOKENIZER, 77, "ipc:///x"))]
            assert server.malformed_total == len(NOISE)
    finally:
        server.close()


def test_the_query_of_a_list(bus: BusConfig) -> None:
    with raw(zmq.ROUTER) as bad_registry:
        bad_registry.bind(bus.registry)

        def answer() -> None:
            route, _ = bad_registry.recv_multipart()
            bad_registry.send_multipart((route, NOT_UTF8))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BlockyardError, match="no membership list"):
            ring_query.ask_members(bus, 5.0)
        thread.join()


def test_logs_of_malformed_frames_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    malformed = Malformed(lambda: now[0])
    reader: FrameReader[Any] = FrameReader(UNIONS["scheduler"], malformed)
    with caplog.at_level(logging.WARNING):
        for sender in range(3000):
            reader.read(msgspec.msgpack.encode(["\n2026 forged line" + "x" * 100_000]), b"%d" % sender)
        assert malformed.total == 3000
        assert len(caplog.records) == LINES_A_MINUTE
        assert all(len(r.getMessage()) < 500 and "\n" not in r.getMessage() for r in caplog.records)
        now[0] = 61.0
        reader.read(NOT_UTF8, b"3000")
        reader.read(NOT_UTF8, b"3000")
        assert len(caplog.records) == LINES_A_MINUTE + 1
        assert "3001 so far" in caplog.records[-1].getMessage()


def test_both_ends_go_on_after_noise(bus: BusConfig) -> None:
    """Two members exchange noise and frames on one link, in both directions."""
    with registry(bus):
        a, b = pair(bus)
        with a, b:
            until(lambda: bool(a.members) and bool(b.members), a, b)
            for links, peer in ((a, b), (b, a)):
                for wire in NOISE[:50]:
                    assert links.send(peer.me.incarnation, msgspec.Raw(wire))  # type: ignore[arg-type]
                assert links.send(peer.me.incarnation, Cancel("good", 1))
            seen: list = []
            until(lambda: len([f for _, _, f in seen if f == Cancel("good", 1)]) == 2, a, b, seen=seen)
            assert a.malformed_total == b.malformed_total == 50
