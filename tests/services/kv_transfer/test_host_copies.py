"""Copies and checksums of scattered blocks in host memory, against plain indexing and the reference."""

import numpy as np
import pytest
import torch

from blockyard.kernels.kv_cache.block_checksum import block_checksums_reference
from blockyard.services.kv_transfer.host_copies import (
    Checksums,
    Words,
    blocks_of,
    copy_blocks,
    pack_blocks,
    unpack_blocks,
)
from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun

# a block in a layer of 64 bytes (gathered in tiles), 24 KiB, and 96 KiB (copied one by one)
SIZES = [(1, 4, 2), (12, 64, 4), (12, 64, 16)]
LAYERS, BLOCKS = 5, 40
IDS = [
    [3],
    [4, 0, 2, 39],
    list(range(7, 30)),
    [5, 6, 7, 1, 2, 20],
    list(np.random.default_rng(1).permutation(BLOCKS)),
    [],
]


def layout_of(heads: int, head_dim: int, block_size: int) -> BlockLayout:
    return BlockLayout(runs=(LayerRun(LAYERS, heads, head_dim),), block_size=block_size, dtype="float32", dtype_bytes=4)


def random_blocks(layout: BlockLayout, seed: int) -> Words:
    rng = np.random.default_rng(seed)
    (blocks,) = blocks_of(rng.integers(0, 256, BLOCKS * layout.block_bytes, dtype=np.uint8), layout)
    return blocks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ids", IDS, ids=len)
@pytest.mark.parametrize("layers", [range(LAYERS), range(2, 3), range(1, 4)], ids=str)
def test_copies_and_checksums(size: tuple[int, int, int], ids: list[int], layers: range) -> None:
    layout = layout_of(*size)
    source, target = random_blocks(layout, 1), random_blocks(layout, 2)
    before = target.copy()
    source_ids = np.array(ids, np.int64)
    target_ids = np.array([(block * 3 + 1) % BLOCKS for block in ids], np.int64) if len(ids) < 20 else source_ids
    these = np.arange(layers.start, layers.stop)[:, None]
    expected = before.copy()
    expected[these, target_ids] = source[these, source_ids]
    copy_blocks(source, source_ids, target, target_ids, layers)
    assert (target == expected).all()

    packed = np.zeros((len(layers), len(ids), source.shape[2]), np.uint64)
    pack_blocks(source, source_ids, layers, packed)
    assert (packed == source[these, source_ids]).all()
    again = before.copy()
    unpack_blocks(packed, again, target_ids, layers)
    assert (again == expected).all()

    memory = torch.from_numpy(source.view(np.int64))
    reference = block_checksums_reference(memory, torch.from_numpy(source_ids), layers).numpy().view(np.uint64)
    checksums = Checksums(layout.sections[0])
    assert (checksums.of_blocks(source, source_ids, layers) == reference).all()
    if ids:
        assert (checksums.of_packed(packed, layers) == reference).all()


def test_memory_that_is_not_whole_blocks() -> None:
    layout = layout_of(*SIZES[0])
    with pytest.raises(ValueError, match="not whole blocks"):
        blocks_of(np.zeros(layout.block_bytes + 8, np.uint8), layout)
    odd = BlockLayout(runs=(LayerRun(1, 1, 2),), block_size=1, dtype="float8_e5m2", dtype_bytes=1)
    with pytest.raises(ValueError, match="words of 8 bytes"):
        blocks_of(np.zeros(4, np.uint8), odd)
