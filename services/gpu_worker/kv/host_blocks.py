"""Host memory that keeps KV blocks: how many there is room for, and what copies them."""

import importlib

from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.memory import MemoryPlan
from blockyard.services.kv_transfer.host_store import BlockStore, PlainStore

STORE = "blockyard.services.kv_transfer.stream_store"  # imports Triton: loaded by name, for a GPU alone


def staging_bytes(device_type: str, plan: MemoryPlan) -> int:
    """Device memory that copies go through."""
    if device_type != "cuda" or not plan.num_blocks:
        return 0
    size: int = importlib.import_module(STORE).STAGING_BYTES
    return size


def make_store(plan: MemoryPlan, pool: KVPool) -> BlockStore | None:
    """None where there is no host memory for blocks. Raises LoadError if it cannot be had."""
    if not plan.num_blocks:
        return None
    if pool.device.type != "cuda":
        return PlainStore(pool.memory, plan.num_blocks)
    store: BlockStore = importlib.import_module(STORE).StreamStore(pool.memory, plan.num_blocks)
    return store
