"""The KV blocks of a pool, for transfers to and from other workers."""

import hashlib

import numpy as np

from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.host_swap import HostSwap
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.kv_transfer.arena import Arena
from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun, LayoutPart


class RankBlocks:
    """Implements `TransferBlocks` for the part of the blocks that a follower has. Blocks are read and written in place.

    The leader keeps their state.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    @property
    def arena(self) -> Arena:
        return self._pool.arena

    @property
    def layout(self) -> BlockLayout | None:
        pool, shape, of_model = self._pool, self._pool.shape, self._pool.shape.of_model
        if pool.scales_pending:
            return None
        scales = pool.scales if pool.model_scales is None else pool.model_scales
        runs = [(layers, kept, of_model.attention[layers.start]) for layers, kept in of_model.runs]
        heads = tuple((one.first_kv_head, one.first_kv_head + one.kv_heads) for _, _, one in runs)
        is_part = shape.num_layers < of_model.num_layers or any(one.model_kv_heads for _, _, one in runs)
        return BlockLayout(
            runs=tuple(
                LayerRun(len(layers), one.model_kv_heads or heads, size, planes)
                for layers, (planes, heads, size), one in runs
            ),
            part=LayoutPart(shape.first_layer, shape.num_layers, heads) if is_part else None,
            block_size=pool.block_size,
            dtype=str(pool.dtype).removeprefix("torch."),
            dtype_bytes=pool.dtype.itemsize,
            scales=b"" if scales is None else hashlib.sha256(scales.cpu().numpy().tobytes()).digest(),
        )

    def begin_send(self, transfer: int, blocks: list[int]) -> None:
        """The scheduler keeps the blocks until the transfer has ended."""

    def begin_receive(self, transfer: int, blocks: list[int]) -> None:
        pass

    def landed(self, blocks: list[int]) -> None:
        pass

    def end(self, transfer: int) -> None:
        """Blocks that did not land stay without KV until they are written."""


class PoolBlocks(RankBlocks):
    """The same for a leader, or a worker with one rank."""

    def __init__(self, pool: KVPool, block_hashes: BlockHashes, host_swap: HostSwap) -> None:
        super().__init__(pool)
        self._block_hashes, self._host_swap = block_hashes, host_swap

    def begin_receive(self, transfer: int, blocks: list[int]) -> None:
        self._block_hashes.invalidate(np.array(blocks, np.int64))
        self._host_swap.expect(blocks)

    def landed(self, blocks: list[int]) -> None:
        self._host_swap.landed(blocks)
