"""The staging buffers of nixl: back-pressure, transfers that end in between, and places that are none."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kv_peers import LARGE, SENDER, Pair, Peer, needs_nixl

from blockyard.services.kv_transfer.connectors import nixl, nixl_access
from blockyard.services.kv_transfer.connectors.nixl_agent import Place
from blockyard.services.kv_transfer.protocol.events import Received, Sent
from blockyard.shared.config.services.process import BusConfig

pytestmark = needs_nixl

ALL = range(LARGE.num_layers)
BLOCKS = list(range(0, 120, 2))  # of 512 KiB: 8 in a buffer
SOURCES = BLOCKS[::-1]


@pytest.fixture
def pair(bus: BusConfig) -> Iterator[Pair]:
    source, target = (Peer(bus, LARGE, 128) for _ in range(2))
    source.fill_random()
    it = Pair(source, target, "nixl")
    it.until(lambda: it.sender.connector == "nixl")
    yield it
    it.close()
    assert it.receiver._staging._used == it.sender._staging._used == 0
    source.close()
    target.close()


def all_are_free(it: Pair) -> bool:
    writer: Any = it.sender._writer
    return len(writer._copies._theirs.free) == nixl_access.NUM_BUFFERS and len(writer._free) == nixl.NUM_BUFFERS


def send(it: Pair, number: int) -> None:
    it.begin(number, BLOCKS)
    it.sender.write(number, SOURCES, BLOCKS, ALL)


def lands(it: Pair, number: int) -> None:
    """A transfer of all blocks, with every buffer free after it."""
    send(it, number)
    it.until(lambda: number in it.ended and number in it.sent)
    assert it.ended[number].outcome is Received.LANDED
    assert (it.target.blocks[:, BLOCKS] == it.source.blocks[:, SOURCES]).all()
    it.until(lambda: all_are_free(it))


def test_a_sender_waits_for_a_receiver_that_empties_no_buffer(pair: Pair) -> None:
    send(pair, 1)
    pair.until(lambda: pair.sender._transfers._open[1].blocks is not None)
    written = 0
    deadline = time.monotonic() + 10
    while written < nixl_access.NUM_BUFFERS * 8:
        assert time.monotonic() < deadline
        pair.sender.poll()
        written = min(mask.bit_count() for mask in pair.sender._transfers._open[1].written)
    for _ in range(200):
        pair.sender.poll()
        time.sleep(0.0005)
    it = pair.sender._transfers._open[1]
    assert min(mask.bit_count() for mask in it.written) == nixl_access.NUM_BUFFERS * 8, "one more buffer was written"
    assert it.in_flight == nixl.NUM_BUFFERS, "these are packed and wait"
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.LANDED
    assert (pair.target.blocks[:, BLOCKS] == pair.source.blocks[:, SOURCES]).all()


def test_a_receiver_that_empties_no_buffer_costs_its_link(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "STALLED_S", 0.2)
    monkeypatch.setattr(nixl, "WAIT_S", 0.05)
    send(pair, 1)
    pair.until(lambda: pair.sender._transfers._open[1].blocks is not None)
    deadline = time.monotonic() + 10
    ended: list[Any] = []
    while not ended:
        assert time.monotonic() < deadline
        ended += pair.sender.poll()
        time.sleep(0.0005)
    assert ended[0].outcome is Sent.LINK_LOST and "it frees no buffer" in pair.sender.closed


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_buffers_of_a_transfer_that_is_given_up_are_free_again(pair: Pair, side: str) -> None:
    for number in range(1, 8):
        send(pair, number)
        pair.until(lambda number=number: number in pair.ended or bool(pair.landed.get(number)))
        if side == "sender":
            pair.sender.abort(number, "test")
        else:
            pair.receiver.revoke(number)
        pair.until(lambda number=number: number in pair.ended and number in pair.sent)
    assert {it.outcome for it in pair.ended.values()} <= {Received.ABORTED, Received.REVOKED, Received.LANDED}
    pair.until(lambda: all_are_free(pair))
    lands(pair, 99)


def test_an_old_use_frees_no_buffer(pair: Pair) -> None:
    lands(pair, 1)
    writer: Any = pair.sender._writer
    theirs = writer._copies._theirs
    place = theirs.take()
    theirs.end(Place(place.use - 1, place.buffer))
    theirs.end(Place(place.use, place.buffer + 1))
    assert place.buffer not in theirs.free
    theirs.end(place)
    theirs.end(place)
    assert list(theirs.free).count(place.buffer) == 1


@pytest.mark.parametrize("place", [b"", b"short", Place(1, nixl_access.NUM_BUFFERS).bytes(), Place(1, 2**63).bytes()])
def test_a_place_that_is_none_ends_the_transfer(pair: Pair, place: bytes) -> None:
    """The sender is at fault: the receiver neither reads beyond its buffers nor stops."""
    pair.until(lambda: pair.receiver._links[SENDER].reader is not None)
    reader: Any = pair.receiver._links[SENDER].reader
    start = reader.start
    reader.start = lambda landing, payload, *rest: start(landing, memoryview(place), *rest)
    before = pair.target.blocks.copy()
    pair.begin(1, [4, 5])
    pair.sender.write(1, [7, 8], [4, 5], ALL)
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.REVOKED and "names no buffer" in pair.ended[1].detail
    assert (pair.target.blocks == before).all()


def test_more_blocks_than_a_buffer_holds_end_the_transfer(pair: Pair) -> None:
    pair.begin(1, BLOCKS)
    writer: Any = pair.sender._writer
    pair.sender._transfers.set_chunk_bytes(1 << 30)
    writer._buffers._views = [writer._buffers.arena.bytes] * nixl.NUM_BUFFERS  # three buffers as one
    pair.sender.write(1, BLOCKS[:20], BLOCKS[:20], ALL)
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.REVOKED and "names no buffer" in pair.ended[1].detail


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_side_without_staging_memory_opens_no_link(pair: Pair, side: str) -> None:
    second = Pair(pair.source, pair.target, "nixl")
    (second.sender if side == "sender" else second.receiver)._staging._limit = 1 << 20
    second.until(lambda: bool(second.sender.closed))
    assert "of 1 MiB of staging memory are in use" in second.sender.closed
    assert ("refused" in second.sender.closed) == (side == "receiver")
    second.close()
