"""Every head of every layer reaches every rank that has it, for all pairs of ranks 1 to 4. No processes."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.parallel.shares import Shard, share
from blockyard.services.kv_transfer.host_copies import Bytes, Checksums, blocks_of, blocks_of_part, copy_blocks
from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun, LayoutPart
from blockyard.services.kv_transfer.routes import (
    RankPlace,
    decode_places,
    encode_places,
    find_routes,
    pair_number,
    rank_incarnation,
    rank_ticket,
)

SIZES = [(a, b) for a in range(1, 5) for b in range(1, 5)]
NUM_BLOCKS = 3

runs = st.lists(
    st.builds(LayerRun, st.integers(1, 3), st.integers(1, 9), st.sampled_from([2, 4]), st.sampled_from([1, 2])),
    min_size=1,
    max_size=3,
).map(tuple)


def parts(layout: BlockLayout, size: int, stages: int = 1) -> list[LayoutPart]:
    """Of ranks that have K/V heads as workers divide them, in stages of some layers."""
    found = []
    for stage, rank in itertools.product(range(stages), range(size)):
        heads = [share(run.kv_heads, Shard(rank, size)) for run in layout.runs]
        layers = share(layout.num_layers, Shard(stage, stages))
        found.append(LayoutPart(layers.start, len(layers), tuple((one.start, one.stop) for one in heads)))
    return found


def blocks_in(layout: BlockLayout, part: LayoutPart, whole: Bytes) -> Bytes:
    """What a rank has of the memory of a whole model."""
    own = layout.of(part)
    memory = np.zeros(NUM_BLOCKS * own.block_bytes, np.uint8)
    for mine, all_of in zip(blocks_of(memory, own), blocks_of_part(whole, layout, part), strict=True):
        mine[:] = all_of.reshape(mine.shape)
    return memory


@given(runs, st.sampled_from(SIZES), st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
def test_every_receiver_gets_all_that_it_has(
    of: tuple[LayerRun, ...], sizes: tuple[int, int], stages: tuple[int, int]
) -> None:
    """Blocks are copied as links copy them, route after route, and their checksums are equal on both sides."""
    layout = BlockLayout(runs=of, block_size=1, dtype="x", dtype_bytes=8)
    if layout.num_layers < max(stages):
        return
    whole = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * layout.block_bytes, np.uint8)
    senders, receivers = (parts(layout, size, num) for size, num in zip(sizes, stages, strict=True))
    sources = [blocks_in(layout, part, whole) for part in senders]
    targets = [np.zeros(NUM_BLOCKS * layout.of(part).block_bytes, np.uint8) for part in receivers]
    written: Counter[tuple[int, int, int]] = Counter()
    ids, to = np.arange(NUM_BLOCKS), np.arange(NUM_BLOCKS)[::-1].copy()
    routes = find_routes(layout, senders, receivers)
    for sender, receiver, some, _ in routes:
        part = some or layout.whole
        theirs = blocks_of_part(sources[sender], layout.of(senders[sender]), part)
        mine = blocks_of_part(targets[receiver], layout.of(receivers[receiver]), part)
        for section, source, target in zip(layout.of(part).sections, theirs, mine, strict=True):
            layers = range(len(section.layers))
            copy_blocks(source, ids, target, to, layers)
            sums = Checksums(section)
            assert (sums.of_blocks(source, ids, layers) == sums.of_blocks(target, to, layers)).all()
            written.update(itertools.product([receiver], section.layers, section.heads))
    assert set(written.values()) == {1}, "nothing is written twice"
    for part, target in zip(receivers, targets, strict=True):
        expected = blocks_in(layout, part, whole)
        for got, wanted in zip(blocks_of(target, layout.of(part)), blocks_of(expected, layout.of(part)), strict=True):
            assert (got[:, to] == wanted).all()
    assert len({route.pair for route in routes}) == len(routes)


def test_receivers_take_copied_heads_from_different_ranks() -> None:
    """Latent rows, and one head that all ranks have."""
    layout = BlockLayout(runs=(LayerRun(2, 1, 16, planes=1),), block_size=1, dtype="x", dtype_bytes=2)
    routes = find_routes(layout, parts(layout, 4), parts(layout, 2))
    assert [(one.sender, one.receiver, one.part) for one in routes] == [(0, 0, None), (1, 1, None)]
    assert [one.sender for one in find_routes(layout, parts(layout, 2), parts(layout, 4))] == [0, 1, 0, 1]


def test_equal_shapes_are_one_link_a_rank() -> None:
    layout = BlockLayout(runs=(LayerRun(2, 8, 16),), block_size=1, dtype="x", dtype_bytes=2)
    routes = find_routes(layout, parts(layout, 2), parts(layout, 2))
    assert [(one.sender, one.receiver) for one in routes] == [(0, 0), (1, 1)]
    [one] = find_routes(layout, parts(layout, 1), parts(layout, 1))
    assert one.part is None, "all of the model, as without ranks"


def test_a_receiver_that_nobody_can_serve() -> None:
    layout = BlockLayout(runs=(LayerRun(2, 8, 16),), block_size=1, dtype="x", dtype_bytes=2)
    with pytest.raises(ValueError, match="is on no rank of the sender"):
        find_routes(layout, parts(layout, 2)[:1], parts(layout, 1))


def test_parts_that_a_rank_does_not_have() -> None:
    layout = BlockLayout(runs=(LayerRun(2, 8, 16),), block_size=1, dtype="x", dtype_bytes=2)
    first, second = parts(layout, 2)
    for part in (second, LayoutPart(0, 3, ((0, 4),)), LayoutPart(0, 2, ()), LayoutPart(-1, 2, ((-2, 4),))):
        with pytest.raises(ValueError, match=r"is not in|is nothing of"):
            layout.of(first).cut(part)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 2**20), unique=True, max_size=5))
def test_numbers_of_pairs_differ(scheduler: int, counts: list[int]) -> None:
    """Of all transfers of a scheduler; and one pair of ranks has the number of the transfer."""
    layout = BlockLayout(runs=(LayerRun(2, 8, 16),), block_size=1, dtype="x", dtype_bytes=2)
    routes = find_routes(layout, parts(layout, 2), parts(layout, 4))
    numbers = [pair_number((scheduler << 31) + count, route) for count in counts for route in routes]
    assert len(set(numbers)) == len(numbers) and all(0 <= number < 2**64 for number in numbers)
    [one] = find_routes(layout, parts(layout, 1), parts(layout, 1))
    assert pair_number(77, one) == 77


def test_ranks_are_told_apart() -> None:
    assert rank_incarnation(5, 0) == 5 and len({rank_incarnation(2**64 - 1, rank) for rank in range(64)}) == 64
    assert rank_ticket(b"", 1) == b"" and len({rank_ticket(b"t", rank) for rank in range(4)}) == 4


def test_places_travel_as_bytes() -> None:
    places = [RankPlace("ipc:///x", 3, LayoutPart(0, 2, ((0, 4),)))]
    assert decode_places(encode_places(places)) == places
    for wrong in (b"", b"ipc:///x", encode_places([])):
        with pytest.raises(ValueError, match=r"no ranks|not a worker's KV endpoint"):
            decode_places(wrong)
