"""The state of a link between polls: `busy`, and its open transfers."""

import threading
import time
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import msgspec
import pytest
from kv_peers import RECEIVER, SENDER, SMALL, Pair, Peer

from blockyard.services.kv_transfer.block_copier import HostCopier
from blockyard.services.kv_transfer.device_copier import DeviceCopier
from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.protocol.events import Received, Sent
from blockyard.services.kv_transfer.protocol.frames import (
    LINK_VERSION,
    LinkHello,
    LinkReady,
    ToSender,
    Transfer,
    WritesAllowed,
)
from blockyard.services.kv_transfer.protocol.incoming import IncomingTransfers
from blockyard.shared.bus.sockets import readable

ALL = range(SMALL.num_layers)
encode = msgspec.msgpack.encode


@pytest.fixture
def may_complete(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No copy is reported as complete while it is not set."""
    event = threading.Event()
    event.set()

    def poll(copier: Any, poll: Callable[[Any], None]) -> None:
        if event.is_set():
            poll(copier)

    for kind in (HostCopier, DeviceCopier):
        monkeypatch.setattr(kind, "poll", partialmethod(poll, poll=kind.poll))
    return event


def numbers(transfers: list[Transfer]) -> list[int]:
    return sorted(transfer.number for transfer in transfers)


def test_a_sender_is_busy_while_frames_or_copies_wait_for_room(pair: Pair, may_complete: threading.Event) -> None:
    assert pair.sender.busy, "the hello is not sent yet"
    pair.sender.poll()
    assert not pair.sender.busy, "it waits for an answer, which its socket reports"
    pair.until(lambda: pair.sender.connector != "")
    pair.until(lambda: not pair.sender.busy)
    may_complete.clear()
    for number in range(12):  # more than a connector has in flight
        pair.begin(number, [number])
        pair.sender.write(number, [number], [number], ALL)
    pair.until(lambda: pair.sender.busy)
    for _ in range(20):
        pair.turn()
    assert pair.sender.busy and not pair.sent, "copies wait until others are complete"
    may_complete.set()
    pair.until(lambda: len(pair.ended) == len(pair.sent) == 12)
    assert not pair.sender.busy and not pair.receiver.busy


def test_a_send_that_is_aborted_before_the_link_is_open_ends_on_both_sides(pair: Pair) -> None:
    """Its `Stopped` reaches the receiver right behind the hello, before any permission to write."""
    pair.begin(1, [1])
    pair.sender.write(1, [1], [1], ALL)
    pair.sender.abort(1, "given up")
    pair.until(lambda: 1 in pair.ended and 1 in pair.sent)
    assert pair.ended[1].outcome is Received.ABORTED and pair.sent[1].outcome is Sent.ABORTED


def test_a_receiver_is_busy_while_a_link_is_full_and_loses_no_frame(peers: tuple[Peer, Peer]) -> None:
    """The sender reads nothing, until the queues of both sides are full."""
    source, target = peers
    receiver = target.receiver()
    raw = source.sockets.connect_dealer(receiver.endpoint, b"x")
    raw.send(encode(LinkHello(LINK_VERSION, SENDER, 1, RECEIVER, SMALL)))
    raw.send(encode(LinkReady("tcp", 0)))
    assert not receiver.busy
    decode, allowed = msgspec.msgpack.Decoder(ToSender).decode, []
    deadline, count = time.monotonic() + 10, 0
    while not receiver.busy:
        assert time.monotonic() < deadline and receiver.poll() == []
        for _ in range(200):
            receiver.expect(Transfer(count, SENDER, 1, RECEIVER, 1, list(range(30))))
            count += 1
    assert receiver.poll() == [] and receiver.busy
    while len(allowed) < count:
        assert time.monotonic() < deadline and receiver.poll() == []
        while readable(raw):
            frame = decode(raw.recv())
            if isinstance(frame, WritesAllowed):
                allowed.append(frame.transfer.number)
    assert allowed == list(range(count)) and not receiver.busy
    raw.close(0)
    receiver.close()


def test_both_sides_name_their_open_transfers_to_a_scheduler_that_attaches(
    pair: Pair, may_complete: threading.Event
) -> None:
    """A new scheduler knows nothing of earlier transfers: it must hear of each one that still uses blocks."""
    pair.until(lambda: pair.sender.connector != "")
    whole, part = pair.begin(1, [1, 2]), pair.begin(2, [3, 4])
    unknown = pair.transfer(3, [5])
    pair.receiver.expect(unknown)  # the sender has not begun it
    revoked = pair.begin(4, [6])
    pair.sender.write(1, [0, 1], [1, 2], ALL)
    pair.sender.write(2, [2], [3], ALL)
    pair.until(lambda: 1 in pair.ended and 1 in pair.sent and 2 in pair.landed)
    may_complete.clear()
    is_started = threading.Event()
    pair.sender.write(4, [3], [6], ALL, lambda: is_started.set() or True)
    pair.until(is_started.is_set)
    pair.receiver.revoke(4)
    for _ in range(20):
        pair.turn()
    assert pair.receiver.open_transfers() == [part, unknown, revoked]
    assert pair.sender.open_transfers() == {2: [2], 4: [3]}, "its copy still reads block 3"
    may_complete.set()
    pair.until(lambda: 4 in pair.ended and 4 in pair.sent)
    for transfer in (part, unknown):
        pair.receiver.revoke(transfer.number)
    pair.until(lambda: len(pair.ended) == 4)
    assert pair.receiver.open_transfers() == [] and pair.sender.open_transfers() == {}
    assert whole.number in pair.ended


def test_open_transfers_after_the_sender_attaches_again(pair: Pair) -> None:
    """A new link ends what the old one was allowed, keeps what it was not, and carries new transfers."""
    pair.until(lambda: pair.sender.connector != "")
    pair.begin(1, [1, 2])
    pair.sender.write(1, [7], [1], ALL)
    pair.until(lambda: 1 in pair.landed)
    pair.break_link()
    pair.until(lambda: 1 in pair.sent)
    assert pair.sent[1].outcome is Sent.LINK_LOST and pair.sender.open_transfers() == {}
    if pair.sender.connector in ("shm", "cuda_ipc", "nixl"):  # the sender's process lives: it may still write
        pair.until(lambda: pair.unreachable == [1])
        assert numbers(pair.receiver.open_transfers()) == [1]
    else:
        pair.until(lambda: 1 in pair.ended)
    late = pair.transfer(2, [3, 4])
    pair.receiver.expect(late)
    pair.sender = pair.source.sender(pair.receiver.endpoint, pair.sender.connector)
    pair.sender.begin(2, 1)
    pair.until(lambda: pair.sender.connector != "" and 1 in pair.ended)
    assert (pair.ended[1].outcome, pair.ended[1].landed) == (Received.SENDER_LOST, [0])
    assert pair.receiver.open_transfers() == [late] and pair.sender.open_transfers() == {2: []}
    pair.sender.write(2, [8, 9], [3, 4], ALL)
    pair.until(lambda: 2 in pair.ended and 2 in pair.sent)
    assert pair.ended[2].outcome is Received.LANDED
    assert (pair.target.blocks[:, [3, 4]] == pair.source.blocks[:, [8, 9]]).all()
    assert pair.receiver.open_transfers() == [] and pair.sender.open_transfers() == {}


def test_an_unexpected_error_of_a_sender_ends_its_transfers_and_its_next_link_works(
    peers: tuple[Peer, Peer], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pair = Pair(*peers, "shm")
    pair.begin(1, [4])
    pair.sender.write(1, [1], [4], ALL, fails)
    pair.until(lambda: 1 in pair.sent)
    assert pair.sent[1].outcome is Sent.LINK_LOST and "illegal memory access" in pair.sender.closed
    assert "Traceback" in caplog.text
    pair.sender = pair.source.sender(pair.receiver.endpoint)
    pair.until(lambda: 1 in pair.ended)
    pair.begin(2, [5])
    pair.sender.write(2, [2], [5], ALL)
    pair.until(lambda: 2 in pair.ended)
    assert pair.ended[1].outcome is not Received.LANDED and pair.ended[2].outcome is Received.LANDED
    pair.close()


def test_an_unexpected_error_of_a_receiver_closes_the_link(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise KeyError(1)

    pair = Pair(*peers, "tcp")
    pair.begin(1, [4])
    with monkeypatch.context() as patch:
        patch.setattr(IncomingTransfers, "on_sums", fails)
        pair.sender.write(1, [1], [4], ALL)
        pair.until(lambda: bool(pair.sender.closed))
    assert "an error of the receiver: KeyError: 1" in pair.sender.closed and "Traceback" in caplog.text
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is not Received.LANDED
    pair.close()


def test_a_copy_of_blocks_that_the_receiver_does_not_have_is_aborted(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    map_peer = HostCopier.map_peer

    def map_smaller(copier: HostCopier, *args: Any) -> list[Words]:
        return [blocks[:, :4] for blocks in map_peer(copier, *args)]

    monkeypatch.setattr(HostCopier, "map_peer", map_smaller)
    pair = Pair(*peers, "shm")
    pair.until(lambda: pair.sender.connector == "shm")
    pair.begin(1, [4])
    pair.sender.write(1, [1], [4], ALL)
    pair.until(lambda: 1 in pair.sent and 1 in pair.ended)
    assert pair.sent[1].outcome is Sent.ABORTED and not pair.sender.closed
    assert "are not in the pools" in pair.sent[1].detail
    pair.close()
