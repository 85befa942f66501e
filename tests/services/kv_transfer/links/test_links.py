"""Links between two workers in this process: both connectors, ends, damage."""

import contextlib
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kv_peers import RECEIVER, SENDER, SMALL, Pair, Peer, poll_both

from blockyard.services.kv_transfer import sender_link
from blockyard.services.kv_transfer.connectors.mapped import MappedReader
from blockyard.services.kv_transfer.connectors.nixl_access import NixlReader
from blockyard.services.kv_transfer.connectors.tcp import TcpReader
from blockyard.services.kv_transfer.layout import LayerRun, LinkLayouts
from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import Received, Sent
from blockyard.services.kv_transfer.sender_link import SenderLink
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import KVTransferConfig

ALL = range(SMALL.num_layers)
encode = msgspec.msgpack.encode


def test_layers_arrive_one_by_one_and_in_parts(pair: Pair) -> None:
    pair.begin(7, [5, 9, 1, 2])
    before = pair.target.blocks.copy()
    pair.sender.write(7, [3, 4], [5, 9], ALL)
    pair.sender.write(7, [8, 0], [1, 2], range(1, 3))
    pair.until(lambda: sorted(pair.landed.get(7, [])) == [0, 1])
    assert not pair.ended and len(pair.receiver.open_transfers()) == len(pair.sender.open_transfers()) == 1
    pair.sender.write(7, [8, 0], [1, 2], range(1))
    pair.until(lambda: 7 in pair.ended)
    assert pair.ended[7].outcome is Received.LANDED and sorted(pair.landed[7]) == pair.ended[7].landed == [0, 1, 2, 3]
    assert pair.sent[7].outcome is Sent.WRITTEN
    assert pair.sender.bytes_written == 4 * SMALL.block_bytes
    assert (pair.target.blocks[:, [5, 9, 1, 2]] == pair.source.blocks[:, [3, 4, 8, 0]]).all()
    rest = [block for block in range(30) if block not in (5, 9, 1, 2)]
    assert (pair.target.blocks[:, rest] == before[:, rest]).all()
    assert not pair.receiver.drops.by_reason and not pair.sender.drops.by_reason


def test_many_transfers_at_once(pair: Pair) -> None:
    pair.sender.begin(0, 1)  # the sender hears of it first
    for number in range(1, 10):
        pair.begin(number, [number * 3, number * 3 + 1])
        pair.sender.write(number, [number, 19 - number], [number * 3, number * 3 + 1], ALL)
    pair.sender.write(0, [0], [0], ALL)
    pair.until(lambda: len(pair.ended) == 9)
    pair.receiver.expect(pair.transfer(0, [0]))
    pair.until(lambda: len(pair.ended) == 10 and len(pair.sent) == 10)
    assert {event.outcome for event in pair.ended.values()} == {Received.LANDED}
    for number in range(1, 10):
        expected = pair.source.blocks[:, [number, 19 - number]]
        assert (pair.target.blocks[:, [number * 3, number * 3 + 1]] == expected).all()
    assert pair.receiver.open_transfers() == [] and pair.sender.open_transfers() == {}


def test_both_sides_give_up(pair: Pair) -> None:
    for number in (1, 2):
        pair.begin(number, [2 * number, 2 * number + 1])
        pair.sender.write(number, [number], [2 * number], ALL)
    pair.until(lambda: len(pair.landed) == 2)
    pair.sender.abort(1, "preempted")
    pair.receiver.revoke(2)
    pair.until(lambda: len(pair.ended) == len(pair.sent) == 2)
    assert (pair.ended[1].outcome, pair.ended[1].landed) == (Received.ABORTED, [0])
    assert pair.ended[1].detail == "preempted"
    assert pair.ended[2].outcome is Received.REVOKED
    assert (pair.sent[1].outcome, pair.sent[2].outcome) == (Sent.ABORTED, Sent.STOPPED)
    pair.sender.write(2, [5], [5], ALL)  # the model has not heard of it yet
    assert pair.sender.open_transfers() == {}


def test_a_transfer_that_the_sender_never_began_can_be_given_up(pair: Pair) -> None:
    transfer = pair.transfer(5, [1, 2])
    pair.receiver.expect(transfer)
    pair.until(lambda: pair.sender.connector != "")
    for _ in range(10):
        pair.turn()
        time.sleep(0.001)
    pair.receiver.revoke(5)
    pair.until(lambda: 5 in pair.ended)
    assert pair.ended[5].outcome is Received.REVOKED
    pair.sender.begin(5, 1)  # its plan came late
    pair.sender.write(5, [1, 2], [1, 2], ALL)
    pair.until(lambda: 5 in pair.sent)
    assert pair.sent[5].outcome is Sent.STOPPED and not pair.target.blocks.any()


def test_the_sender_closes_its_link(pair: Pair) -> None:
    pair.begin(1, [2, 3])
    pair.sender.write(1, [1], [2], ALL)
    pair.until(lambda: 1 in pair.landed)
    pair.sender.close()
    assert [event.outcome for event in pair.sender.poll()] == [Sent.ABORTED]
    pair.until(lambda: 1 in pair.ended)
    assert (pair.ended[1].outcome, pair.ended[1].landed) == (Received.ABORTED, [0])


def send_another(pair: Pair, number: int) -> None:
    """The sender has received all earlier permissions after it."""
    pair.begin(number, [number + 10])
    pair.sender.write(number, [0], [number + 10], ALL)
    pair.until(lambda: number in pair.ended and number in pair.sent)


def num_pidfds() -> int:
    """Descriptors of processes that this one watches."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found += entry.readlink() == Path("anon_inode:[pidfd]")
    return found


def test_a_transfer_that_was_not_begun_goes_on_over_the_next_link(pair: Pair) -> None:
    """The sender has closed an idle link while the receiver allowed a new transfer on it."""
    before = num_pidfds()
    pair.begin(1, [1])
    pair.sender.write(1, [4], [1], ALL)
    pair.until(lambda: 1 in pair.ended and 1 in pair.sent)
    pair.receiver.expect(pair.transfer(2, [2, 3]))
    send_another(pair, 3)
    connector = pair.sender.connector
    pair.sender.close()
    pair.receiver.expect(pair.transfer(4, [20]))
    pair.receiver.revoke(4)
    pair.until(lambda: 4 in pair.ended)  # now that the link is closed
    assert pair.receiver.open_transfers() == [pair.transfer(2, [2, 3])] and num_pidfds() == before
    pair.sender = pair.source.sender(pair.receiver.endpoint, connector)
    pair.sender.begin(2, 1)
    pair.sender.write(2, [5, 6], [2, 3], ALL)
    pair.until(lambda: 2 in pair.ended and 2 in pair.sent)
    assert pair.ended[2].outcome is Received.LANDED and not pair.receiver.drops.by_reason


def test_a_transfer_that_was_not_begun_can_be_given_up_after_its_link_was_closed(pair: Pair) -> None:
    """Its sender sleeps, and opens no link any more: the blocks are free at once."""
    pair.receiver.expect(pair.transfer(1, [1]))
    pair.receiver.expect(pair.transfer(2, [2]))
    send_another(pair, 3)
    pair.receiver.revoke(2)  # the sender closes the link before it hears of this
    pair.sender.close()
    pair.until(lambda: 2 in pair.ended)
    pair.receiver.revoke(1)
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is pair.ended[2].outcome is Received.REVOKED


@pytest.mark.parametrize("harm", ["word", "layer"])
def test_damage_is_found_and_only_the_damaged_block_fails(
    pair: Pair, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes change after the sender has computed their checksums, and before the receiver does."""
    pair.begin(1, [10, 11, 12])
    pair.sender.write(1, [1, 2, 3], [10, 11, 12], ALL)
    pair.sender.poll()

    def harmed(reader: Any, landing: Any, payload: Any, *rest: Any, start: Any) -> None:
        pair.source.copies.drain()
        if payload is None:
            blocks = pair.target.blocks
            damage(blocks)
            pair.target.put(blocks)
        elif isinstance(reader, NixlReader):
            packed = reader.packed(landing, payload)
            assert packed is not None
            words = packed.to("cpu", copy=True).numpy().view(np.uint64)
            damage_packed(words.reshape(len(ALL), 3, -1))
            packed.copy_(torch.from_numpy(words.view(np.uint8)))
        else:
            words = np.frombuffer(bytearray(payload), np.uint64).reshape(len(ALL), 3, -1)
            damage_packed(words)
            payload = memoryview(words).cast("B", (words.nbytes,))
        start(reader, landing, payload, *rest)

    def damage(blocks: np.ndarray) -> None:
        if harm == "word":
            blocks[1, 11, 5] ^= np.uint64(1 << 63)
        else:
            blocks[[0, 1], 11] = blocks[[1, 0], 11]

    def damage_packed(words: np.ndarray) -> None:
        if harm == "word":
            words[1, 1, 5] ^= np.uint64(1 << 63)
        else:
            words[[0, 1], 1] = words[[1, 0], 1]

    for kind in (MappedReader, TcpReader, NixlReader):
        monkeypatch.setattr(kind, "start", partialmethod(harmed, start=kind.start))
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.CORRUPT
    assert (pair.ended[1].landed, pair.ended[1].corrupt) == ([0, 2], [1])
    assert pair.landed[1] == [0, 2]


def test_without_checksums_blocks_land_too(bus: BusConfig) -> None:
    layout = msgspec.structs.replace(SMALL, checksums=False)
    for connector in ("shm", "tcp"):
        source, target = Peer(bus, layout, 20), Peer(bus, layout, 30)
        source.fill_random()
        pair = Pair(source, target, connector)
        pair.begin(1, [4, 5])
        pair.sender.write(1, [9, 3], [4, 5], ALL)
        pair.until(lambda pair=pair: 1 in pair.ended)
        assert pair.ended[1].landed == [0, 1]
        assert (target.blocks[:, [4, 5]] == source.blocks[:, [9, 3]]).all()
        pair.close()
        source.close()
        target.close()


def test_auto_takes_shared_memory_if_it_can_be_opened(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(*peers, "auto")
    pair.until(lambda: pair.sender.connector == "shm")
    pair.close()
    handle = peers[1].arena.export(RECEIVER)
    assert handle is not None
    wrong = [
        None,
        msgspec.structs.replace(handle, nonce=bytes(16)),
        msgspec.structs.replace(handle, fd=0),
        msgspec.structs.replace(handle, pid=2**22 + 1),
    ]
    for export in wrong:
        monkeypatch.setattr(peers[1].arena, "export", lambda me, export=export: export)
        pair = Pair(*peers, "auto")
        pair.until(lambda pair=pair: pair.sender.connector == "tcp")
        pair.close()
        pair = Pair(*peers, "shm")
        pair.until(lambda pair=pair: bool(pair.sender.closed))
        assert "cannot be mapped" in pair.sender.closed
        pair.close()


@pytest.mark.parametrize("which", ["layout", "receiver", "generation", "connector"])
def test_a_link_that_cannot_be_is_refused_in_words(which: str, bus: BusConfig, peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    receiver = target.receiver()
    layout = (
        msgspec.structs.replace(SMALL, scope="other|main", runs=(LayerRun(3, 4, 4),)) if which == "layout" else SMALL
    )
    if which == "generation":
        target.copies.drain()
        target.arena.drop()
    me = RECEIVER + 1 if which == "receiver" else RECEIVER
    connector = "carrier pigeon" if which == "connector" else "auto"
    config = KVTransferConfig(connector=connector)
    own = (LinkLayouts(layout), source.arena, source.copies)
    link = SenderLink(source.sockets, receiver.endpoint, me, SENDER, *own, config)
    poll_both(receiver, link, lambda: bool(link.closed))
    words = {
        "layout": "layers 3 of 2 KV heads of 8 here, 3 of 4 KV heads of 4 there; model '' here, 'other|main' there",
        "receiver": "it wants 4f, this is 4e",
        "generation": "KV memory is another one now",
        "connector": "unknown KV connector 'carrier pigeon': use one of auto, cuda_ipc, shm, tcp, nixl",
    }
    assert words[which] in link.closed
    link.close()
    receiver.close()


def test_a_receiver_that_does_not_answer(
    peers: tuple[Peer, Peer], bus: BusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_link, "HELLO_S", 0.05)
    link = peers[0].sender(f"{bus.bind}/nobody")
    link.begin(1, 1)
    deadline, events = time.monotonic() + 5, []
    while not events and time.monotonic() < deadline:
        events = link.poll()
    assert [event.outcome for event in events] == [Sent.LINK_LOST] and "does not answer" in link.closed
    link.close()


def test_an_arena_that_was_dropped_ends_its_links(pair: Pair) -> None:
    pair.begin(1, [2, 3])
    pair.sender.write(1, [1], [2], ALL)
    pair.until(lambda: 1 in pair.landed)
    pair.source.arena.drop()
    pair.until(lambda: 1 in pair.sent)
    assert pair.sent[1].outcome is Sent.LINK_LOST and "memory is another one" in pair.sender.closed


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(
    ("sources", "targets"),
    [([1, 2], [11, 12]), ([1, 2], [11, 10]), ([1], [13]), ([1, 2], [10]), ([1, 2, 3, 4], [10, 11, 12, 13])],
)
def test_a_send_that_contradicts_the_receiver_ends_its_transfer(
    pair: Pair, sources: list[int], targets: list[int], is_early: bool
) -> None:
    """The plan names other blocks than the receiver has reserved, before or after the receiver allows writes."""
    pair.receiver.expect(pair.transfer(1, [10, 11, 12]))
    pair.receiver.expect(pair.transfer(2, [14]))
    pair.sender.begin(1, 1)
    pair.sender.begin(2, 1)
    pair.sender.write(2, [6], [14], ALL)
    if not is_early:
        pair.until(lambda: 2 in pair.sent)  # after the permission for 1
    pair.sender.write(1, [5], [11], ALL)
    pair.sender.write(1, sources, targets, ALL)
    pair.until(lambda: len(pair.ended) == len(pair.sent) == 2)
    assert (pair.sent[1].outcome, pair.ended[1].outcome) == (Sent.ABORTED, Received.ABORTED)
    assert pair.sender.drops.by_reason == {DropReason.CONTRADICTION: 1}
    assert pair.ended[2].outcome is Received.LANDED
    assert not pair.target.blocks[:, [10, 12, 13]].any()


def test_a_transfer_to_an_earlier_memory_of_the_receiver_ends(pair: Pair) -> None:
    pair.receiver.expect(pair.transfer(1, [10]))
    pair.sender.begin(1, 2)
    pair.sender.write(1, [5], [10], ALL)
    pair.until(lambda: 1 in pair.ended and 1 in pair.sent)
    assert (pair.sent[1].outcome, pair.ended[1].outcome) == (Sent.ABORTED, Received.ABORTED)
    assert pair.sender.drops.by_reason == {DropReason.OLD_GENERATION: 1} and not pair.target.blocks.any()


def test_a_late_write_to_dropped_memory_changes_no_block(peers: tuple[Peer, Peer]) -> None:
    pair = Pair(*peers, "shm")
    pair.begin(1, [2, 3])
    pair.until(lambda: pair.sender.connector == "shm")
    for _ in range(20):
        pair.turn()
    pair.receiver.close()
    peers[1].arena.drop()
    pair.receiver = peers[1].receiver()
    pair.sender.write(1, [1, 2], [2, 3], ALL)
    pair.until(lambda: bool(pair.sent))
    peers[0].copies.drain()
    assert not peers[1].blocks.any()
    pair.close()


# -- strangers
