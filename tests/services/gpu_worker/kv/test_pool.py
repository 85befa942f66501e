"""The memory of layers that differ in what they keep."""

import math
from dataclasses import replace

import numpy as np
import torch

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.host_swap import HostSwap, copy_blocks
from blockyard.services.gpu_worker.kv.pool import KVPool, block_bytes
from blockyard.services.gpu_worker.kv.pool_blocks import PoolBlocks
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.kv_transfer.host_copies import blocks_of
from blockyard.services.kv_transfer.layout import LayerRun
from blockyard.shared.messages import BlockCopy

LOCAL = AttentionShape(num_heads=4, kv_heads=2, head_dim=8, rules=ScoreRules(scale=1.0, window=16))
GLOBAL = replace(LOCAL, kv_heads=1, head_dim=24, rules=ScoreRules(scale=1.0))
LATENT = replace(LOCAL, kv_heads=1, head_dim=12, latent_dim=8)
SHAPE = ModelShape(vocab_size=10, max_positions=64, attention=(LOCAL, LOCAL, GLOBAL, LATENT, LOCAL))
BLOCKS, SIZE = 6, 4


def make() -> KVPool:
    pool = KVPool(SHAPE, BLOCKS, SIZE, torch.float32, torch.device("cpu"))
    for i, layer in enumerate(pool.layers):
        for block in range(BLOCKS):
            layer[block] = 100 * i + block + 1
    return pool


def test_layers_share_an_arena_and_do_not_overlap() -> None:
    pool = make()
    assert [tuple(layer.shape) for layer in pool.layers] == [
        (BLOCKS, 2, 2, SIZE, 8),
        (BLOCKS, 2, 2, SIZE, 8),
        (BLOCKS, 2, 1, SIZE, 24),
        (BLOCKS, 1, 1, SIZE, 12),
        (BLOCKS, 2, 2, SIZE, 8),
    ]
    assert [len(run) for run in pool.runs] == [2, 1, 1, 1]
    assert block_bytes(SHAPE, SIZE, torch.float32) == 4 * SIZE * (3 * 32 + 48 + 12)
    assert pool.arena.bytes.numel() == BLOCKS * block_bytes(SHAPE, SIZE, torch.float32)
    for i, layer in enumerate(pool.layers):
        assert [float(block.unique().item()) for block in layer] == [100 * i + block + 1 for block in range(BLOCKS)]


def test_blocks_are_copied_and_scrubbed_in_all_layers() -> None:
    pool = make()
    copy_blocks(pool, BlockHashes(BLOCKS), [BlockCopy(1, 4), BlockCopy(0, 2)])
    for i, layer in enumerate(pool.layers):
        assert [float(layer[block].unique().item()) for block in (4, 2, 3)] == [100 * i + 2, 100 * i + 1, 100 * i + 4]
        layer[5] = math.nan
    pool.scrub(np.array([5]))
    assert all(bool((layer[5] == 0).all()) and bool((layer[4] != 0).all()) for layer in pool.layers)


def test_the_layout_for_transfers_finds_each_layer() -> None:
    pool = make()
    layout = PoolBlocks(pool, BlockHashes(BLOCKS), HostSwap(BlockHashes(BLOCKS), SIZE, None)).layout
    assert layout is not None
    assert layout.runs == (LayerRun(2, 2, 8), LayerRun(1, 1, 24), LayerRun(1, 1, 12, planes=1), LayerRun(1, 2, 8))
    assert layout.block_bytes == block_bytes(SHAPE, SIZE, torch.float32)
    for words, run in zip(blocks_of(pool.arena.bytes.numpy(), layout), pool.runs, strict=True):
        assert (words.view(np.float32) == run.flatten(2).numpy()).all()
