"""The attention of a step on a GPU, with Triton kernels. Imported only on a GPU."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.fused_decode import SplitSemaphores, fused_decode
from blockyard.kernels.attention.paged_decode import paged_decode, schedule_decode
from blockyard.kernels.attention.paged_prefill import paged_prefill
from blockyard.kernels.attention.prefill_hopper import prefill_hopper
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.gpu_facts import is_capturing, runs_hopper_kernels
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.attention.choice import AttentionKernel, RowKind, choose, gpu_decodes
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_latent import LatentLayers
from blockyard.services.gpu_worker.kv.pool import KVPool, LayerKV
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices


@dataclass(frozen=True, slots=True)
class KernelRows:
    """The rows that one kernel computes: all decodes or all prefills of a step."""

    metadata: PagedKVMetadata
    query_start_loc: Tensor | None  # see `AttentionMetadata`; None: decodes
    max_seq_len: int


class TritonKernel(Protocol):
    """Computes the attention of all decodes or of all prefills of a step. Their K and V are already stored."""

    def schedule(self, q: Tensor, kv: LayerKV, rows: KernelRows) -> SplitKVSchedule | None:
        """Builds metadata for all layers with this window, and these heads; None if the kernel needs none."""
        return None

    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        """Runs the kernel: q [rows, heads, head_dim] -> out [rows, heads * head_dim]."""


class SplitKVDecode(TritonKernel):
    def schedule(self, q: Tensor, kv: LayerKV, rows: KernelRows) -> SplitKVSchedule:
        return schedule_decode(q, kv.memory, rows.metadata, kv.rules, rows.max_seq_len)

    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        paged_decode(q, kv.memory, rows.metadata, kv.rules, rows.max_seq_len, out, schedule)


class PagedPrefill(TritonKernel):
    def __init__(self, kernel: Callable[..., None]) -> None:
        """kernel: `paged_prefill` or `prefill_hopper`."""
        self._kernel = kernel

    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        self._kernel(q, kv.memory, rows.metadata, rows.query_start_loc, kv.rules, rows.max_seq_len, out)


class BatchInvariant(TritonKernel):
    """Computes each row with the same bits in every batch."""

    def attend(self, q: Tensor, kv: LayerKV, rows: KernelRows, out: Tensor, schedule: SplitKVSchedule | None) -> None:
        # sets the split length, so it must not depend on the step
        most = rows.metadata.tables.shape[1] * kv.memory.shape[3]
        is_decode, starts = rows.query_start_loc is None, rows.query_start_loc
        if starts is None:
            starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        batch_invariant_attention(q, kv.memory, rows.metadata, starts, kv.rules, most, out, is_decode)


KERNELS: dict[AttentionKernel, TritonKernel] = {
    AttentionKernel.SPLIT_KV_DECODE: SplitKVDecode(),
    AttentionKernel.PAGED_PREFILL: PagedPrefill(paged_prefill),
    AttentionKernel.PAGED_PREFILL_HOPPER: PagedPrefill(prefill_hopper),
    AttentionKernel.TRITON_BATCH_INVARIANT: BatchInvariant(),
}


@dataclass(slots=True)
class LayerGroup:
    """The kernels of layers with the same window and heads in a step, and the schedule that they share."""

    decode: TritonKernel
    prefill: TritonKernel
    schedule: SplitKVSchedule | None = None


def build_attention(pool: KVPool, metadata: AttentionMetadata, semaphores: SplitSemaphores | None = None) -> Attend:
    """Builds the attention of a step. semaphores: state of the fused decode kernel; None: it must not run."""
    table_len = metadata.rows.tables.shape[1] * pool.block_size
    max_seq_len, num_rows = min(metadata.max_seq_len or table_len, table_len), len(metadata.rows.slots)
    decodes_only, has_latent = metadata.query_start_loc is None, pool.shape.has_latent
    if decodes_only and semaphores is not None and not has_latent:
        case = gpu_decodes(pool, pool.shape.attention[0], max_seq_len, runs_hopper_kernels(pool.device))
        if choose(replace(case, decodes_only=True, num_rows=num_rows)) is AttentionKernel.FUSED_DECODE:
            return FusedDecodeAttention(pool, metadata.rows, max_seq_len, semaphores)
    bounded = replace(
        metadata,
        num_decodes=num_rows if decodes_only else metadata.num_decodes,
        max_seq_len=max_seq_len,
        prefill_max_seq_len=metadata.prefill_max_seq_len or max_seq_len,
    )
    return TritonAttention(pool, bounded, LatentLayers(pool, bounded) if has_latent else None)


class FusedDecodeAttention:
    """Attention of a small decode batch: one kernel rotates, stores K and V, and attends. Implements `step.Attend`."""

    def __init__(self, pool: KVPool, rows: PagedKVMetadata, max_seq_len: int, semaphores: SplitSemaphores) -> None:
        self._pool, self._rows, self._max_seq_len, self._semaphores = pool, rows, max_seq_len, semaphores

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        memory, rules = self._pool.kv[layer]
        return fused_decode(qkv, memory, self._rows, rotation, norm, rules, self._max_seq_len, self._semaphores)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        raise AssertionError("no step of a model with latent layers is fused")

    def of_rows(self, indices: LogitsIndices) -> Attend:
        raise AssertionError("all rows of a fused step need logits")


class TritonAttention:
    """Attention of any step: one kernel stores K and V, then one attends for decodes and one for prefills."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata, latent: LatentLayers | None = None) -> None:
        """metadata: with both bounds of sequence lengths, and the number of decodes. latent: computes latent layers."""
        assert metadata.max_seq_len is not None
        assert metadata.prefill_max_seq_len is not None
        rows, num_decodes, starts = metadata.rows, metadata.num_decodes, metadata.query_start_loc
        self._prefill_max_seq_len = metadata.prefill_max_seq_len
        self._pool, self._shapes = pool, pool.shape.attention
        self._rows, self._num_decodes = rows, num_decodes
        self._decodes = KernelRows(rows.part(slice(num_decodes)), None, metadata.max_seq_len)
        self._prefills = None if starts is None else KernelRows(rows, starts, metadata.prefill_max_seq_len)
        self._latent = latent
        # by window, its kind, and the numbers of heads and their size
        self._groups: dict[tuple[int | None, bool, int, int, int], LayerGroup] = {}
        self._side: torch.cuda.Stream | None = None  # stream of the prefills of this layer

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        q, num_decodes, group = self.store(layer, qkv, rotation, norm), self._num_decodes, self.group(layer)
        kv = self._pool.kv[layer]
        out = qkv.new_empty((len(qkv), q.shape[1] * q.shape[2]))
        if num_decodes and group.schedule is None:
            group.schedule = group.decode.schedule(q[:num_decodes], kv, self._decodes)
        if self._prefills is not None:
            with self._beside(num_decodes):
                group.prefill.attend(q, kv, self._prefills, out[num_decodes:], None)
        if num_decodes:
            group.decode.attend(q[:num_decodes], kv, self._decodes, out[:num_decodes], group.schedule)
        self._join()
        return out

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        assert self._latent is not None
        return self._latent(layer, query, rotation, latent)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return RowsAsDecodes(self._pool, self, self._latent, indices, self._decodes)

    def group(self, layer: int) -> LayerGroup:
        """The kernels of a layer, chosen once for all that are alike."""
        shape = self._shapes[layer]
        key = (shape.rules.window, shape.rules.chunked, shape.num_heads, shape.kv_heads, shape.head_dim)
        group = self._groups.get(key)
        if group is None:
            decodes = gpu_decodes(self._pool, shape, self._decodes.max_seq_len, runs_hopper_kernels(self._pool.device))
            prefills = replace(decodes, kind=RowKind.PREFILL, max_seq_len=self._prefill_max_seq_len)
            group = self._groups[key] = LayerGroup(KERNELS[choose(decodes)], KERNELS[choose(prefills)])
        return group

    def store(self, layer: int, qkv: Tensor, rotation: Tensor | None, norm: RMSNorm | None) -> Tensor:
        """Normalises and rotates the tokens of a step, and stores their K and V. Returns q."""
        pool = self._pool
        if pool.scales is not None and pool.scales_pending and self._prefills is not None:
            self._measure_scales(layer, qkv, rotation, norm)
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        memory, rules = pool.kv[layer]
        rope_write_kv(
            qkv, memory, self._rows, rotation, weight, eps, rules.kv_scales, batch_invariant=pool.batch_invariant
        )
        return qkv[:, : self._shapes[layer].num_heads]

    @contextlib.contextmanager
    def _beside(self, num_decodes: int) -> Iterator[None]:
        """Runs its body on a second stream during CUDA graph capture, parallel to the attention of decodes.

        A short prefill leaves multiprocessors idle. Outside of graphs the host's calls for a second stream cost more
        time than they save.
        """
        if not num_decodes or not is_capturing(self._pool.device):
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

    def _measure_scales(self, layer: int, qkv: Tensor, rotation: Tensor | None, norm: RMSNorm | None) -> None:
        """Sets the scales of 8-bit K and V by the first step with a prefill."""
        heads = self._shapes[layer].num_heads
        rotated = heads + self._shapes[layer].kv_heads
        normed = qkv.clone()
        if norm is not None:
            normed[:, : len(norm.weight)] = norm(qkv[:, : len(norm.weight)])
        if rotation is not None:
            apply_rope_reference(normed[:, :rotated], rotation)
        self._pool.measure_scales(layer, normed[:, heads:rotated], normed[:, rotated:])


class RowsAsDecodes:
    """Stores K and V of all tokens of a step, and computes some rows, each as a decode. Implements `step.Attend`."""

    def __init__(
        self, pool: KVPool, step: TritonAttention, latent: LatentLayers | None, indices: LogitsIndices,
        decodes: KernelRows,
    ) -> None:  # fmt: skip
        """decodes: of the step."""
        self._pool, self._step, self._latent, self._indices = pool, step, latent, indices
        rows = PagedKVMetadata(indices.slots, indices.positions, decodes.metadata.tables)
        self._rows = replace(decodes, metadata=rows)

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        q, decode = self._step.store(layer, qkv, rotation, norm), self._step.group(layer).decode
        out = q.new_empty((len(self._indices.rows), q.shape[1] * q.shape[2]))
        if len(out):
            q, kv = q.index_select(0, self._indices.rows), self._pool.kv[layer]
            decode.attend(q, kv, self._rows, out, decode.schedule(q, kv, self._rows))
        return out

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        assert self._latent is not None
        return self._latent(layer, query, rotation, latent, self._indices)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return self._step.of_rows(indices)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
