"""Copies blocks within the pool: a forked sequence needs its own copy of the last block if that is not full."""

import numpy as np
import torch

from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.shared.messages import BlockCopy

AT_ONCE = 64  # blocks; bounds the temporary memory


@torch.inference_mode()
def copy_blocks(pool: KVPool, names: BlockHashes, copies: list[BlockCopy]) -> None:
    """Copies in all layers, on the stream of steps: before the plan's runs and after those of earlier plans.

    No block is both source and destination. Blocks outside of the pool are skipped: their slots fail at their start.
    """
    known = [(c.src, c.dst) for c in copies if 0 <= c.src < pool.num_blocks and 0 <= c.dst < pool.num_blocks]
    for first in range(0, len(known), AT_ONCE):
        pairs = np.array(known[first : first + AT_ONCE], np.int64).T
        names.invalidate(pairs[1])
        src, dst = torch.from_numpy(pairs).to(pool.device, non_blocking=True)
        pool.memory.index_copy_(1, dst, pool.memory.index_select(1, src))
