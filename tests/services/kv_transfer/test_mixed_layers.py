"""Transfers of blocks whose layers differ in what they keep, with every connector."""

import numpy as np
import pytest
from kv_peers import MIXED, Pair

from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.layout import Section
from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import Received, Sent
from blockyard.services.kv_transfer.protocol.frames import BlocksWritten, Transfer, WritesAllowed
from blockyard.services.kv_transfer.protocol.incoming import IncomingTransfers
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite, OutgoingTransfers

ALL = range(MIXED.num_layers)


def test_sections_follow_one_another() -> None:
    assert MIXED.sections == (
        Section(0, range(2), 2, range(2), 128, 0),
        Section(1, range(2, 3), 1, range(1), 384, 1024),
        Section(2, range(3, 5), 2, range(2), 128, 1408),
    )
    assert [section.piece_bytes for section in MIXED.sections] == [512, 384, 512]
    assert MIXED.block_bytes == 4 * 512 + 384
    assert [MIXED.find_section(layers) for layers in (range(1, 3), range(0), range(-1, 1), range(4, 6))] == [None] * 4
    with pytest.raises(ValueError, match="not layers of one of"):
        MIXED.section_of(range(1, 3))


def test_layers_of_all_sections_arrive(mixed_pair: Pair) -> None:
    pair, before = mixed_pair, [section.copy() for section in mixed_pair.target.sections]
    pair.begin(7, [5, 9, 1, 2])
    pair.sender.write(7, [3, 4], [5, 9], ALL)
    pair.sender.write(7, [8, 0], [1, 2], range(1, 4))
    pair.until(lambda: sorted(pair.landed.get(7, [])) == [0, 1])
    pair.sender.write(7, [8, 0], [1, 2], range(1))
    pair.sender.write(7, [8, 0], [1, 2], range(4, 5))
    pair.until(lambda: 7 in pair.ended and 7 in pair.sent)
    assert pair.ended[7].outcome is Received.LANDED and pair.ended[7].landed == [0, 1, 2, 3]
    assert pair.sent[7].outcome is Sent.WRITTEN and pair.sender.bytes_written == 4 * MIXED.block_bytes
    rest = [block for block in range(30) if block not in (5, 9, 1, 2)]
    for sent, arrived, was in zip(pair.source.sections, pair.target.sections, before, strict=True):
        assert (arrived[:, [5, 9, 1, 2]] == sent[:, [3, 4, 8, 0]]).all()
        assert (arrived[:, rest] == was[:, rest]).all()
    assert not pair.receiver.drops.by_reason and not pair.sender.drops.by_reason


def test_damage_is_seen_in_every_section(mixed_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, on_written = mixed_pair, OutgoingTransfers.on_written
    damaged = {1: 0, 2: 2, 3: 3}  # first layer of a section, by transfer

    def on_damaged(transfers: OutgoingTransfers, write: BlockWrite, sums: Words | None) -> bool:
        assert sums is not None
        return on_written(transfers, write, sums + np.uint64(write.layers.start == damaged[write.number]))

    monkeypatch.setattr(OutgoingTransfers, "on_written", on_damaged)
    for number in damaged:
        pair.begin(number, [number])
        pair.sender.write(number, [number], [number], ALL)
    pair.until(lambda: len(pair.ended) == 3)
    assert {event.outcome for event in pair.ended.values()} == {Received.CORRUPT}


def test_copies_keep_to_one_section() -> None:
    sender = OutgoingTransfers(MIXED, 1, chunk_bytes=1 << 20)
    receiver = IncomingTransfers(MIXED, 2, 1)
    receiver.expect(Transfer(1, 1, 1, 2, 1, [4, 5]))
    receiver.on_link(1)
    sender.begin(1, 1)
    [(_, allowed)] = receiver.take_frames()
    assert isinstance(allowed, WritesAllowed)
    sender.on_allowed(allowed)
    sender.write(1, [0, 1], [4, 5], ALL)
    writes = []
    while (write := sender.next_write()) is not None:
        writes.append(write.layers)
    assert writes == [range(2), range(2, 3), range(3, 5)]
    for layers, size in ((range(1, 3), 2 * (512 + 384)), (range(2, 4), 4 * 512), (range(2), 2 * 2 * 384)):
        frame = BlocksWritten(1, 1, 0, 2, layers.start, len(layers))
        assert receiver.on_written(1, frame, size) is None
    assert receiver.drops.by_reason == {DropReason.WRONG_SIZE: 3}
    assert receiver.on_written(1, BlocksWritten(1, 1, 0, 2, 2, 1), 2 * 384) is not None
