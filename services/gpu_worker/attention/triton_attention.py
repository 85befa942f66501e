"""The attention of a step on a GPU, with Triton kernels. Imported only on a GPU."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.fused_decode import SplitSemaphores, fused_decode
from blockyard.kernels.attention.paged_decode import paged_decode, schedule_decode
from blockyard.kernels.attention.paged_prefill import paged_prefill
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.attention.choice import AttentionCase, AttentionKernel, RowKind, choose
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_latent import LatentLayers
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices


@dataclass(frozen=True, slots=True)
class KernelRows:
    """The rows that one kernel computes: all decodes or all prefills of a step."""

    metadata: PagedKVMetadata
    query_start_loc: Tensor | None  # see `AttentionMetadata`; None: decodes
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV cache of one layer."""

    memory: Tensor  # [num_blocks, 2, kv_heads, block_size, head_dim]
    scales: Tensor | None  # [2] float32, of 8-bit K and V
    shape: AttentionShape


class TritonKernel(Protocol):
    """Computes the attention of all decodes or of all prefills of a step. Their K and V are already stored."""

    def schedule(self, q: Tensor, kv: LayerKV, rows: KernelRows) -> SplitKVSchedule | None:
        """Builds metadata for all layers with this window, and these heads; None if the kernel needs none."""
        return None

    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        """Runs the kernel: q [rows, heads, head_dim] -> out [rows, heads * head_dim]."""


class SplitKVDecode(TritonKernel):
    def schedule(self, q: Tensor, kv: LayerKV, rows: KernelRows) -> SplitKVSchedule:
        return schedule_decode(q, kv.memory, rows.metadata, kv.shape.window, rows.max_seq_len, kv.shape.chunked)

    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        scale, window, cap = kv.shape.scale, kv.shape.window, kv.shape.soft_cap
        options = (cap, schedule, kv.scales, kv.shape.chunked, kv.shape.sinks)
        paged_decode(q, kv.memory, rows.metadata, scale, window, rows.max_seq_len, out, *options)


class PagedPrefill(TritonKernel):
    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        assert rows.query_start_loc is not None
        scale, window, cap = kv.shape.scale, kv.shape.window, kv.shape.soft_cap
        starts, most = rows.query_start_loc, rows.max_seq_len
        options = (cap, kv.scales, kv.shape.chunked, kv.shape.sinks)
        paged_prefill(q, kv.memory, rows.metadata, starts, scale, window, most, out, *options)


class BatchInvariant(TritonKernel):
    """Computes each row with the same bits in every batch."""

    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        # sets the split length, so it must not depend on the step
        most = rows.metadata.tables.shape[1] * kv.memory.shape[3]
        is_decode, starts = rows.query_start_loc is None, rows.query_start_loc
        if starts is None:
            starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        scale, window, cap = kv.shape.scale, kv.shape.window, kv.shape.soft_cap
        batch_invariant_attention(
            q,
            kv.memory,
            rows.metadata,
            starts,
            scale,
            window,
            most,
            out,
            is_decode,
            cap,
            kv.scales,
            kv.shape.chunked,
            kv.shape.sinks,
        )


KERNELS: dict[AttentionKernel, TritonKernel] = {
    AttentionKernel.SPLIT_KV_DECODE: SplitKVDecode(),
    AttentionKernel.PAGED_PREFILL: PagedPrefill(),
    AttentionKernel.TRITON_BATCH_INVARIANT: BatchInvariant(),
}


def build_attention(pool: KVPool, metadata: AttentionMetadata, semaphores: SplitSemaphores | None = None) -> Attend:
    """Builds the attention of a step. semaphores: state of the fused decode kernel; None: it must not run."""
    table_len = metadata.rows.tables.shape[1] * pool.block_size
    max_seq_len, num_rows = min(metadata.max_seq_len or table_len, table_len), len(metadata.rows.slots)
    decodes_only, has_latent = metadata.query_start_loc is None, pool.shape.has_latent
    case = AttentionCase(
        device="cuda",
        kind=RowKind.DECODE,
        kv_dtype=pool.dtype,
        batch_invariant=pool.batch_invariant,
        decodes_only=decodes_only and semaphores is not None and not has_latent,
        num_rows=num_rows,
        max_seq_len=max_seq_len,
    )
    decode = choose(case)
    if decode is AttentionKernel.FUSED_DECODE:
        assert semaphores is not None
        return FusedDecodeAttention(pool, metadata.rows, max_seq_len, semaphores)
    prefill = choose(replace(case, kind=RowKind.PREFILL))
    bounded = replace(
        metadata,
        num_decodes=num_rows if decodes_only else metadata.num_decodes,
        max_seq_len=max_seq_len,
        prefill_max_seq_len=metadata.prefill_max_seq_len or max_seq_len,
    )
    latent = LatentLayers(pool, bounded) if has_latent else None
    return TritonAttention(pool, bounded, KERNELS[decode], KERNELS[prefill], latent)


class FusedDecodeAttention:
    """Attention of a small decode batch: one kernel rotates, stores K and V, and attends. Implements `step.Attend`."""

    def __init__(self, pool: KVPool, rows: PagedKVMetadata, max_seq_len: int, semaphores: SplitSemaphores) -> None:
        self._pool, self._rows, self._max_seq_len, self._semaphores = pool, rows, max_seq_len, semaphores

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        pool, shape = self._pool, self._pool.shape.attention[layer]
        scales = None if pool.scales is None else pool.scales[layer]
        return fused_decode(
            qkv,
            pool.layers[layer],
            self._rows,
            rotation,
            norm,
            shape.scale,
            shape.window,
            self._max_seq_len,
            self._semaphores,
            shape.soft_cap,
            scales,
            chunked=shape.chunked,
            sinks=shape.sinks,
        )

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        raise AssertionError("no step of a model with latent layers is fused")

    def of_rows(self, indices: LogitsIndices) -> Attend:
        raise AssertionError("all rows of a fused step need logits")


class TritonAttention:
    """Attention of any step: one kernel stores K and V, then one attends for decodes and one for prefills."""

    def __init__(
        self,
        pool: KVPool,
        metadata: AttentionMetadata,
        decode: TritonKernel,
        prefill: TritonKernel,
        latent: LatentLayers | None = None,
    ) -> None:
        """metadata: with both bounds of sequence lengths, and the number of decodes. latent: computes latent layers."""
        assert metadata.max_seq_len is not None
        assert metadata.prefill_max_seq_len is not None
        rows, num_decodes, starts = metadata.rows, metadata.num_decodes, metadata.query_start_loc
        self._pool, self._shapes = pool, pool.shape.attention
        self._rows, self._num_decodes = rows, num_decodes
        decodes = PagedKVMetadata(rows.slots[:num_decodes], rows.positions[:num_decodes], rows.tables)
        self._decodes = KernelRows(decodes, None, metadata.max_seq_len)
        self._prefills = None if starts is None else KernelRows(rows, starts, metadata.prefill_max_seq_len)
        self._decode, self._prefill, self._latent = decode, prefill, latent
        # by window, its kind, and the numbers of heads and their size
        self._schedules: dict[tuple[int | None, bool, int, int, int], SplitKVSchedule | None] = {}
        self._side: torch.cuda.Stream | None = None  # stream of the prefills of this layer

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        q, kv = self.store(layer, qkv, rotation, norm)
        shape, num_decodes = kv.shape, self._num_decodes
        out = qkv.new_empty((len(qkv), shape.num_heads * shape.head_dim))
        key, schedule = (shape.window, shape.chunked, shape.num_heads, shape.kv_heads, shape.head_dim), None
        if num_decodes:
            if key not in self._schedules:  # all layers with this key share one schedule
                self._schedules[key] = self._decode.schedule(q[:num_decodes], kv, self._decodes)
            schedule = self._schedules[key]
        if self._prefills is not None:
            with self._beside(num_decodes):
                self._prefill.attend(q, kv, self._prefills, out[num_decodes:], None)
        if num_decodes:
            self._decode.attend(q[:num_decodes], kv, self._decodes, out[:num_decodes], schedule)
        self._join()
        return out

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        assert self._latent is not None
        return self._latent(layer, query, rotation, latent)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return ChosenRows(self, self._latent, self._decode, indices, self._decodes)

    def store(self, layer: int, qkv: Tensor, rotation: Tensor | None, norm: RMSNorm | None) -> tuple[Tensor, LayerKV]:
        """Normalises, rotates and stores the tokens of a step. Returns q and the cache of the layer."""
        pool, shape = self._pool, self._shapes[layer]
        kv = LayerKV(pool.layers[layer], self._scales(layer, qkv, rotation, norm), shape)
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        rope_write_kv(
            qkv, kv.memory, self._rows, rotation, weight, eps, kv.scales, batch_invariant=pool.batch_invariant
        )
        return qkv[:, : shape.num_heads], kv

    @contextlib.contextmanager
    def _beside(self, num_decodes: int) -> Iterator[None]:
        """Runs its body on a second stream during CUDA graph capture, parallel to the attention of decodes.

        A short prefill leaves multiprocessors idle. Outside of graphs the host's calls for a second stream cost more
        time than they save.
        """
        if not num_decodes or self._pool.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            yield
            return
        self._side = _side_stream(self._pool.device)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
            self._side = None

    def _scales(self, layer: int, qkv: Tensor, rotation: Tensor | None, norm: RMSNorm | None) -> Tensor | None:
        """Returns the scales [2] of 8-bit K and V, or None. The first step with a prefill measures them."""
        pool = self._pool
        if pool.scales is None:
            return None
        if pool.scales_pending and self._prefills is not None:
            heads = self._shapes[layer].num_heads
            rotated = heads + self._shapes[layer].kv_heads
            normed = qkv.clone()
            if norm is not None:
                normed[:, : len(norm.weight)] = norm(qkv[:, : len(norm.weight)])
            if rotation is not None:
                apply_rope_reference(normed[:, :rotated], rotation)
            pool.measure_scales(layer, normed[:, heads:rotated], normed[:, rotated:])
        return pool.scales[layer]


class ChosenRows:
    """Stores K and V of all tokens of a step, and computes some rows, each as a decode. Implements `step.Attend`."""

    def __init__(
        self, step: TritonAttention, latent: LatentLayers | None, decode: TritonKernel, indices: LogitsIndices,
        decodes: KernelRows,
    ) -> None:  # fmt: skip
        self._step, self._latent, self._decode, self._indices = step, latent, decode, indices
        self._rows = replace(
            decodes, metadata=PagedKVMetadata(indices.slots, indices.positions, decodes.metadata.tables)
        )

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        q, kv = self._step.store(layer, qkv, rotation, norm)
        out = q.new_empty((len(self._indices.rows), q.shape[1] * q.shape[2]))
        if len(out):
            q = q.index_select(0, self._indices.rows)
            self._decode.attend(q, kv, self._rows, out, self._decode.schedule(q, kv, self._rows))
        return out

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        assert self._latent is not None
        return self._latent(layer, query, rotation, latent, self._indices)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return self._step.of_rows(indices)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
