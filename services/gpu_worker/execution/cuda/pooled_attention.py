"""The attention of steps that pool, on a GPU: of packed sequences, and of decoders, whose rows the host knows."""

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.attention.packed.packed_attention import packed_attention
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.arrays import Integers, Ints
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.execution.device_loop import StepRequest
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceAttend
from blockyard.services.gpu_worker.host_link import HostLink, put
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import Attend


class TritonChunkAttention:
    """Implements `pooled_steps.ChunkAttention`."""

    def __init__(self, pool: KVPool, link: HostLink, *, has_followers: bool = False) -> None:
        self._pool, self._link, self._has_followers = pool, link, has_followers

    def __call__(self, table: Slots, step: StepRequest, rows: Ints, positions: Ints) -> Attend:
        slots, counts, device = step.rows.slots, step.rows.counts, self._pool.device
        num_decodes, num_seqs = step.rows.num_decodes, len(counts)
        before = table.num_computed[slots]
        longest = int((before + counts).max())
        tables = table.tables[:, : -(-longest // self._pool.block_size)][slots].astype(np.int32)
        sequences = np.repeat(np.arange(num_seqs), counts)
        on_device = PagedKVMetadata(*(put(one, device, self._link) for one in (sequences, positions, tables)))
        has_prefill = num_decodes < num_seqs
        starts = np.concatenate([np.cumsum(counts) - counts, [len(rows)]])[num_decodes:].astype(np.int32)
        metadata = AttentionMetadata(
            on_device,
            query_start_loc=put(starts, device, self._link) if has_prefill else None,
            num_decodes=num_decodes,
            max_seq_len=longest,
            max_context_len=int(before.max()),
        )
        attend = build_attention(self._pool, metadata)
        if not self._has_followers:
            return attend
        ids = table.token_ids[rows, positions]
        sent: list[Integers] = [ids, positions, sequences, starts[: len(starts) * has_prefill], tables.ravel()]
        words = np.concatenate(sent, dtype=np.int32, casting="same_kind").tobytes()
        return DeviceAttend(attend, metadata, 0, words, has_tables=True, scales_pending=self._pool.scales_pending)


class TritonPackedProduct:
    """Implements `packed_attention.PackedProduct`."""

    def __init__(self, starts: Tensor, max_seq_len: int) -> None:
        """starts [num_seqs + 1] int32, on the device: the first row of each sequence, and the end of the last."""
        self._starts, self._max_seq_len = starts, max_seq_len

    def __call__(self, qkv: Tensor, rules: ScoreRules, num_heads: int) -> Tensor:
        out = torch.empty(qkv.shape[0], num_heads * qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
        packed_attention(qkv, self._starts, rules, num_heads, self._max_seq_len, out)
        return out
