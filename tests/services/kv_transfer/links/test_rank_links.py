"""A link between ranks that have different K/V heads moves those of both, and nothing else, with every connector."""

import numpy as np
import pytest
from kv_peers import MIXED, Pair

from blockyard.services.kv_transfer.host_copies import Words, blocks_of_part
from blockyard.services.kv_transfer.layout import LayoutPart
from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import Received, Sent
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite, OutgoingTransfers

ALL = range(MIXED.num_layers)


def heads_of(pair: Pair, part: LayoutPart) -> list[Words]:
    """A copy of the target's blocks, of some heads: [layers, num_blocks, planes, words] of each section."""
    memory = np.concatenate([one.reshape(-1) for one in pair.target.sections]).view(np.uint8)
    return blocks_of_part(memory, MIXED, part)


def test_the_heads_of_both_arrive(rank_pair: Pair) -> None:
    pair, part = rank_pair, rank_pair.part
    assert part is not None
    before = heads_of(pair, MIXED.whole)
    pair.begin(7, [5, 9, 1, 2])
    pair.sender.write(7, [3, 4], [5, 9], ALL)
    pair.sender.write(7, [8, 0], [1, 2], range(2))
    pair.sender.write(7, [8, 0], [1, 2], range(2, 5))
    pair.until(lambda: 7 in pair.ended and 7 in pair.sent)
    assert pair.ended[7].outcome is Received.LANDED and pair.ended[7].landed == [0, 1, 2, 3]
    assert pair.sent[7].outcome is Sent.WRITTEN and pair.sender.bytes_written == 4 * MIXED.of(part).block_bytes
    rest = [block for block in range(30) if block not in (5, 9, 1, 2)]
    for sent, arrived in zip(pair.source.sections, heads_of(pair, part), strict=True):
        assert (arrived[:, [5, 9, 1, 2]].reshape(len(sent), 4, -1) == sent[:, [3, 4, 8, 0]]).all()
    first = LayoutPart(0, MIXED.num_layers, ((0, 1), (0, 0), (0, 1)))
    for now, was in zip(heads_of(pair, MIXED.whole), before, strict=True):
        assert (now[:, rest] == was[:, rest]).all()
    others = zip(heads_of(pair, first), (before[0], before[2]), strict=True)
    assert all((now == was[..., : now.shape[-1]]).all() for now, was in others), "the other head is not touched"
    assert not pair.receiver.drops.by_reason and not pair.sender.drops.by_reason


def test_damage_of_some_heads_is_seen(rank_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, on_written = rank_pair, OutgoingTransfers.on_written

    def on_damaged(transfers: OutgoingTransfers, write: BlockWrite, sums: Words | None) -> bool:
        assert sums is not None
        return on_written(transfers, write, sums + np.uint64(write.number == 1))

    monkeypatch.setattr(OutgoingTransfers, "on_written", on_damaged)
    for number in (1, 2):
        pair.begin(number, [number])
        pair.sender.write(number, [number], [number], ALL)
    pair.until(lambda: len(pair.ended) == 2)
    assert [pair.ended[number].outcome for number in (1, 2)] == [Received.CORRUPT, Received.LANDED]


@pytest.mark.parametrize("rank_pair", ["shm"], indirect=True)
def test_two_sides_that_divide_blocks_otherwise_exchange_none(rank_pair: Pair) -> None:
    pair, transfer = rank_pair, rank_pair.transfer(1, [3])
    pair.receiver.expect(type(transfer)(*[getattr(transfer, name) for name in transfer.__struct_fields__[:-1]]))
    pair.sender.begin(1, 1)
    pair.sender.write(1, [1], [3], ALL)
    pair.until(lambda: 1 in pair.ended and 1 in pair.sent)
    assert (pair.ended[1].outcome, pair.sent[1].outcome) == (Received.ABORTED, Sent.ABORTED)
    assert pair.sender.drops.by_reason == {DropReason.CONTRADICTION: 1}
