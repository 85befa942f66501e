"""Host memory that keeps KV blocks: how many there is room for, and what copies them."""

from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.memory import MemoryPlan
from blockyard.services.kv_transfer.host_store import BlockStore, PlainStore


def staging_bytes(device_type: str, plan: MemoryPlan) -> int:
    """Device memory that copies go through."""
    if device_type != "cuda" or not plan.num_blocks:
        return 0
    # It imports Triton, which a worker on the CPU never loads.
    from blockyard.services.kv_transfer.stream_store import STAGING_BYTES  # noqa: PLC0415

    return STAGING_BYTES


def make_store(plan: MemoryPlan, pool: KVPool) -> BlockStore | None:
    """None where there is no host memory for blocks. Raises LoadError if it cannot be had."""
    if not plan.num_blocks:
        return None
    if pool.device.type != "cuda":
        return PlainStore(pool.memory, plan.num_blocks)
    # It imports Triton, which a worker on the CPU never loads.
    from blockyard.services.kv_transfer.stream_store import StreamStore  # noqa: PLC0415

    return StreamStore(pool.memory, plan.num_blocks)
