"""Makes the store of KV blocks in host memory."""

from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.memory import MemoryPlan
from blockyard.services.kv_transfer.host.host_store import STAGING_BYTES, BlockStore, JoinedStore, PlainStore


def staging_bytes(device_type: str, plan: MemoryPlan) -> int:
    """Device memory of the buffers that copies use."""
    return STAGING_BYTES if device_type == "cuda" and plan.num_blocks else 0


def make_store(plan: MemoryPlan, pool: KVPool) -> BlockStore | None:
    """None without host memory for blocks. Raises LoadError if the memory cannot be allocated."""
    if not plan.num_blocks:
        return None
    if pool.device.type != "cuda":
        return PlainStore(pool.runs, plan.num_blocks)
    # It imports Triton, which a worker on the CPU never loads.
    from blockyard.services.kv_transfer.host.stream_store import StreamStore  # noqa: PLC0415

    parts = [StreamStore(run, plan.num_blocks, STAGING_BYTES // len(pool.runs)) for run in pool.runs]
    return parts[0] if len(parts) == 1 else JoinedStore(parts)
