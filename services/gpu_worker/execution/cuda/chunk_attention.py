"""The attention of a step of a decoder that pools, on a GPU: its rows are known on the host."""

import numpy as np

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.execution.device_loop import StepRequest
from blockyard.services.gpu_worker.host_link import HostLink, put
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import Attend


class TritonChunkAttention:
    """Implements `pooled_steps.ChunkAttention`."""

    def __init__(self, pool: KVPool, link: HostLink) -> None:
        self._pool, self._link = pool, link

    def __call__(self, table: Slots, step: StepRequest, rows: Ints, positions: Ints) -> Attend:
        slots, counts, device = step.rows.slots, step.rows.counts, self._pool.device
        num_decodes, num_seqs = step.rows.num_decodes, len(counts)
        before = table.num_computed[slots]
        longest = int((before + counts).max())
        tables = table.tables[:, : -(-longest // self._pool.block_size)][slots].astype(np.int32)
        metadata = PagedKVMetadata(
            put(np.repeat(np.arange(num_seqs), counts), device, self._link),
            put(positions, device, self._link),
            put(tables, device, self._link),
        )
        starts = np.concatenate([np.cumsum(counts) - counts, [len(rows)]])[num_decodes:].astype(np.int32)
        return build_attention(
            self._pool,
            AttentionMetadata(
                metadata,
                query_start_loc=put(starts, device, self._link) if num_decodes < num_seqs else None,
                num_decodes=num_decodes,
                max_seq_len=longest,
                max_context_len=int(before.max()),
            ),
        )
