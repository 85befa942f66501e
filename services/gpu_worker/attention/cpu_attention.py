"""Attention of one step over the pool: what is written, what each layer reads, and the calls."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.attention.torch_sdpa import (
    decode_attention_reference,
    gather_kv_reference,
    prefill_attention_reference,
    write_kv_reference,
)
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.attention.gathered_kv import KeptKV
from blockyard.services.gpu_worker.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences of which one token is computed, in a row of the batch: one call a layer."""

    start: int
    count: int
    length: int  # keys that are looked at
    chunks: Tensor | None  # flat, see chunk_index; None where `kept` has them
    mask: Tensor | None  # [count, 1, 1, length]
    kept: KeptKV | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several tokens of one sequence, in a row of the batch."""

    start: int
    count: int
    length: int
    chunks: Tensor
    mask: Tensor | None  # [count, length]


@dataclass(frozen=True, slots=True)
class Reads:
    """What layers of one window look at."""

    decodes: list[Decodes]  # from the first row on
    prefills: list[Prefill]


class PagedAttention:
    """For `Step.attend`."""

    def __init__(self, pool: KVPool, rows: Tensor, reads: dict[int | None, Reads]) -> None:
        self._pool, self._rows, self._shape = pool, rows, pool.shape
        self._reads = [reads[window] for window in pool.shape.windows]

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        heads = self._shape.attention[layer].num_heads
        rotated = heads + self._shape.kv_heads
        qk, kv = qkv[:, :rotated], qkv[:, heads:]
        if norm is not None:
            qk = norm(qk)
        if rotation is not None:
            apply_rope_reference(qk, rotation)
        if norm is not None:
            qkv[:, heads:rotated] = qk[:, heads:]
        q = qk[:, :heads]
        write_kv_reference(self._pool.rows[layer], self._rows, kv)
        reads = self._reads[layer]
        if len(reads.decodes) == 1 and not reads.prefills:
            return self._decode(layer, reads.decodes[0], q, kv)
        parts = []
        for decodes in reads.decodes:
            part = slice(decodes.start, decodes.start + decodes.count)
            parts.append(self._decode(layer, decodes, q[part], kv[part]))
        for prefill in reads.prefills:
            known = self._gather(layer, prefill.chunks, 1)[:, :, :, : prefill.length]
            rows = q[prefill.start : prefill.start + prefill.count]
            parts.append(prefill_attention_reference(rows, known, prefill.mask, self._shape.attention[layer].scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, decodes: Decodes, q: Tensor, kv: Tensor) -> Tensor:
        kept = decodes.kept
        if decodes.chunks is not None:
            known = self._gather(layer, decodes.chunks, decodes.count)
            if kept is not None:
                kept.fill(layer, known)
        else:
            assert kept is not None
            known = kept.add(layer, kv)
        known = known.narrow(3, 0, decodes.length)
        return decode_attention_reference(q, known, decodes.mask, self._shape.attention[layer].scale)

    def _gather(self, layer: int, chunks: Tensor, num_seqs: int) -> Tensor:
        return gather_kv_reference(
            self._pool.chunks[layer], chunks, num_seqs, self._shape.kv_heads, self._shape.head_dim
        )
