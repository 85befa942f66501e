"""The KV blocks of a pool, for transfers to and from other workers."""

import hashlib

import numpy as np

from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.host_swap import HostSwap
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.kv_transfer.arena import Arena
from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun


class PoolBlocks:
    """Implements `TransferBlocks`. Blocks are read and written in place."""

    def __init__(self, pool: KVPool, block_hashes: BlockHashes, host_swap: HostSwap) -> None:
        self._pool, self._block_hashes, self._host_swap = pool, block_hashes, host_swap

    @property
    def arena(self) -> Arena:
        return self._pool.arena

    @property
    def layout(self) -> BlockLayout | None:
        pool, shape = self._pool, self._pool.shape
        if pool.scales_pending:
            return None
        scales = b"" if pool.scales is None else hashlib.sha256(pool.scales.cpu().numpy().tobytes()).digest()
        return BlockLayout(
            runs=tuple(LayerRun(len(layers), heads, size, planes) for layers, (planes, heads, size) in shape.runs),
            block_size=pool.block_size,
            dtype=str(pool.dtype).removeprefix("torch."),
            dtype_bytes=pool.dtype.itemsize,
            scales=scales,
        )

    def begin_send(self, transfer: int, blocks: list[int]) -> None:
        """The scheduler keeps the blocks until the transfer has ended."""

    def begin_receive(self, transfer: int, blocks: list[int]) -> None:
        self._block_hashes.invalidate(np.array(blocks, np.int64))
        self._host_swap.expect(blocks)

    def landed(self, blocks: list[int]) -> None:
        self._host_swap.landed(blocks)

    def end(self, transfer: int) -> None:
        """Blocks that did not land stay without KV until they are written."""
