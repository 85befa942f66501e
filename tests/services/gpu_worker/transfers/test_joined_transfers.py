"""A transfer of ranks: landed and ended when it has between all pairs, whatever the order."""

import random

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.transfers.joined_transfers import JoinedTransfers
from blockyard.services.kv_transfer.protocol.events import (
    BlocksLanded,
    Received,
    ReceiverEnded,
    SenderEnded,
    SenderUnreachable,
    Sent,
)

BAD = [Received.ABORTED, Received.SENDER_LOST, Received.REVOKED]


@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False), st.data())
def test_a_block_has_landed_when_it_has_from_all(
    num_pairs: int, num_blocks: int, rng: random.Random, data: st.DataObject
) -> None:
    joined, pairs = JoinedTransfers(), list(range(100, 100 + num_pairs))
    joined.open_receive(7, pairs, num_blocks)
    lost = {pair: data.draw(st.sampled_from([None, None, *BAD])) for pair in pairs}
    arrives = {pair: [i for i in range(num_blocks) if lost[pair] is None or rng.random() < 0.5] for pair in pairs}
    todo = [(pair, position) for pair in pairs for position in arrives[pair]]
    rng.shuffle(todo)
    missing, reported, ended = set(todo), set[int](), list[ReceiverEnded]()
    order = [*todo]
    open_pairs = set(pairs)
    while open_pairs:
        ready = [pair for pair in open_pairs if not any(one == pair for one, _ in missing)]
        if order and (not ready or rng.random() < 0.7):
            pair, position = order.pop()
            missing.discard((pair, position))
            event = joined.on_incoming(BlocksLanded(pair, [position]))
            whole = all(position in arrives[one] and (one, position) not in missing for one in pairs)
            assert event == (BlocksLanded(7, [position]) if whole else None)
            reported |= {position} if whole else set()
            continue
        pair = rng.choice(ready)
        open_pairs.discard(pair)
        outcome = lost[pair] or Received.LANDED
        found = joined.on_incoming(ReceiverEnded(pair, outcome, arrives[pair], []))
        assert (found is None) is bool(open_pairs)
        if isinstance(found, ReceiverEnded):
            ended.append(found)
    [end] = ended
    assert end.landed == sorted(reported)
    assert (end.outcome is Received.LANDED) is all(one is None for one in lost.values())
    assert joined.on_incoming(BlocksLanded(100, [0])) is None, "a late event of a transfer that has ended"


def test_corrupt_blocks_of_one_pair_are_those_of_the_transfer() -> None:
    joined = JoinedTransfers()
    joined.open_receive(7, [1, 2], 2)
    assert joined.on_incoming(BlocksLanded(1, [0, 1])) is None
    assert joined.on_incoming(BlocksLanded(2, [1])) == BlocksLanded(7, [1])
    assert joined.on_incoming(SenderUnreachable(2)) == SenderUnreachable(7)
    assert joined.on_incoming(ReceiverEnded(2, Received.CORRUPT, [1], [0])) is None
    assert joined.on_incoming(ReceiverEnded(1, Received.LANDED, [0, 1], [])) == ReceiverEnded(
        7, Received.CORRUPT, [1], [0]
    )


def test_a_send_has_ended_when_it_has_to_all() -> None:
    joined = JoinedTransfers()
    joined.send(7, [1, 2], [30, 31])
    assert joined.on_sent(SenderEnded(1, Sent.LINK_LOST, "gone")) is None
    joined.send(7, [1, 2], [32])  # a later part: one pair has ended
    assert joined.is_sending(7) and joined.open_sends == {7: [30, 31, 32]}
    assert joined.on_sent(SenderEnded(2, Sent.WRITTEN)) == SenderEnded(7, Sent.LINK_LOST, "gone")
    assert not joined.num_sends and joined.open_sends == {} and joined.on_sent(SenderEnded(2, Sent.WRITTEN)) is None
