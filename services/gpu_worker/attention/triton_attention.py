"""The attention of a step on a GPU, with Triton kernels. Imported only on a GPU."""

import contextlib
import functools
from collections.abc import Iterator
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
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.step import Attend, LogitsIndices


class TritonKernel(Protocol):
    """Computes the attention of all decodes or of all prefills of a step. Their K and V are already stored."""

    def schedule(
        self, q: Tensor, memory: Tensor, seqs: PagedKVMetadata, window: int | None, max_seq_len: int
    ) -> SplitKVSchedule | None:
        """Builds metadata for all layers with this window and number of heads; None if the kernel needs none."""

    def attend(
        self,
        q: Tensor,
        memory: Tensor,
        seqs: PagedKVMetadata,
        starts: Tensor | None,
        shape: AttentionShape,
        max_seq_len: int,
        out: Tensor,
        scales: Tensor | None,
        schedule: SplitKVSchedule | None,
    ) -> None:
        """Runs the kernel: q [rows, heads, head_dim] -> out [rows, heads * head_dim].

        starts: of prefills, see `build_attention`; None for decodes.
        """


class SplitKVDecode:
    def schedule(
        self, q: Tensor, memory: Tensor, seqs: PagedKVMetadata, window: int | None, max_seq_len: int
    ) -> SplitKVSchedule:
        return schedule_decode(q, memory, seqs, window, max_seq_len)

    def attend(
        self,
        q: Tensor,
        memory: Tensor,
        seqs: PagedKVMetadata,
        starts: Tensor | None,
        shape: AttentionShape,
        max_seq_len: int,
        out: Tensor,
        scales: Tensor | None,
        schedule: SplitKVSchedule | None,
    ) -> None:
        paged_decode(q, memory, seqs, shape.scale, shape.window, max_seq_len, out, schedule=schedule, scales=scales)


class PagedPrefill:
    def schedule(self, q: Tensor, memory: Tensor, seqs: PagedKVMetadata, window: int | None, max_seq_len: int) -> None:
        return None

    def attend(
        self,
        q: Tensor,
        memory: Tensor,
        seqs: PagedKVMetadata,
        starts: Tensor | None,
        shape: AttentionShape,
        max_seq_len: int,
        out: Tensor,
        scales: Tensor | None,
        schedule: SplitKVSchedule | None,
    ) -> None:
        assert starts is not None
        paged_prefill(q, memory, seqs, starts, shape.scale, shape.window, max_seq_len, out, scales=scales)


class BatchInvariant:
    """Computes each row with the same bits in every batch."""

    def schedule(self, q: Tensor, memory: Tensor, seqs: PagedKVMetadata, window: int | None, max_seq_len: int) -> None:
        return None

    def attend(
        self,
        q: Tensor,
        memory: Tensor,
        seqs: PagedKVMetadata,
        starts: Tensor | None,
        shape: AttentionShape,
        max_seq_len: int,
        out: Tensor,
        scales: Tensor | None,
        schedule: SplitKVSchedule | None,
    ) -> None:
        reach = seqs.tables.shape[1] * memory.shape[3]  # sets the split length, so it must not depend on the step
        decodes = starts is None
        if starts is None:
            starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        scale, window = shape.scale, shape.window
        batch_invariant_attention(q, memory, seqs, starts, scale, window, reach, out, decodes, scales=scales)


KERNELS: dict[AttentionKernel, TritonKernel] = {
    AttentionKernel.SPLIT_KV_DECODE: SplitKVDecode(),
    AttentionKernel.PAGED_PREFILL: PagedPrefill(),
    AttentionKernel.TRITON_BATCH_INVARIANT: BatchInvariant(),
}


def build_attention(
    pool: KVPool,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
    starts: Tensor | None = None,
    num_decodes: int = 0,
    longest: int | None = None,
    logits_indices: LogitsIndices | None = None,
    reach: int | None = None,
    semaphores: SplitSemaphores | None = None,
) -> Attend:
    """Builds the attention of a step. Rows of decodes come first, one for each sequence, then rows of prefills.

    slots and positions [rows], tables [slots, blocks]: see PagedKVMetadata.
    starts [prefills + 1] int32: first row of each prefill, beginning with `num_decodes`, then the number of rows. None:
    all rows are decodes.
    longest: upper bound of the sequence length; None: the length of the tables. reach: the same bound for prefills
    only; None: `longest`.
    logits_indices: rows that the last layer computes; None: all rows.
    semaphores: state of the fused decode kernel; None: it must not run.
    """
    width = tables.shape[1] * pool.block_size
    longest = min(longest or width, width)
    decode = choose(
        AttentionCase(
            device="cuda",
            kind=RowKind.DECODE,
            head_dim=pool.shape.head_dim,
            kv_dtype=pool.dtype,
            batch_invariant=pool.batch_invariant,
            decodes_only=starts is None and logits_indices is None and semaphores is not None,
            num_rows=len(slots),
            max_seq_len=longest,
        )
    )
    if decode is AttentionKernel.FUSED_DECODE:
        assert semaphores is not None
        return FusedDecodeAttention(pool, PagedKVMetadata(slots, positions, tables), longest, semaphores)
    prefill = choose(
        AttentionCase(
            device="cuda",
            kind=RowKind.PREFILL,
            head_dim=pool.shape.head_dim,
            kv_dtype=pool.dtype,
            batch_invariant=pool.batch_invariant,
        )
    )
    seqs = PagedKVMetadata(slots, positions, tables)
    num_decodes = len(slots) if starts is None else num_decodes
    kernels = KERNELS[decode], KERNELS[prefill]
    return TritonAttention(pool, seqs, starts, num_decodes, longest, logits_indices, reach or longest, kernels)


class FusedDecodeAttention:
    """Attention of a small decode batch: one kernel rotates, stores K and V, and attends. Implements `step.Attend`."""

    def __init__(self, pool: KVPool, seqs: PagedKVMetadata, longest: int, semaphores: SplitSemaphores) -> None:
        self._pool, self._seqs, self._longest, self._semaphores = pool, seqs, longest, semaphores

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        pool, shape = self._pool, self._pool.shape.attention[layer]
        scales = None if pool.scales is None else pool.scales[layer]
        return fused_decode(
            qkv,
            pool.memory[layer],
            self._seqs,
            rotation,
            norm,
            shape.scale,
            shape.window,
            self._longest,
            self._semaphores,
            scales=scales,
        )


class TritonAttention:
    """Attention of any step: one kernel stores K and V, then one attends for decodes and one for prefills."""

    def __init__(
        self,
        pool: KVPool,
        seqs: PagedKVMetadata,
        starts: Tensor | None,
        num_decodes: int,
        longest: int,
        logits_indices: LogitsIndices | None,
        prefill_longest: int,
        kernels: tuple[TritonKernel, TritonKernel],
    ) -> None:
        """kernels: for decodes and for prefills. prefill_longest: `reach` of `build_attention`."""
        self._pool, self._shapes, self._logits_indices = pool, pool.shape.attention, logits_indices
        self._seqs, self._starts, self._num_decodes = seqs, starts, num_decodes
        self._decodes = PagedKVMetadata(seqs.slots[:num_decodes], seqs.positions[:num_decodes], seqs.tables)
        self._longest, self._prefill_longest = longest, prefill_longest
        self._decode, self._prefill = kernels
        self._schedules: dict[tuple[int | None, int], SplitKVSchedule | None] = {}  # key: window, number of heads
        self._side: torch.cuda.Stream | None = None  # stream of the prefills of this layer

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        pool, shape, num_decodes = self._pool, self._shapes[layer], self._num_decodes
        memory = pool.memory[layer]
        scales = self._scales(layer, qkv, rotation, norm)
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        rope_write_kv(qkv, memory, self._seqs, rotation, weight, eps, scales, batch_invariant=pool.batch_invariant)
        q = qkv[:, : shape.num_heads]
        if self._logits_indices is not None and layer == len(self._shapes) - 1:
            return self._last(q, memory, shape, self._logits_indices, scales)
        out = qkv.new_empty((len(qkv), shape.num_heads * shape.head_dim))
        key, schedule = (shape.window, shape.num_heads), None
        if num_decodes:
            if key not in self._schedules:  # all layers with this key share one schedule
                self._schedules[key] = self._decode.schedule(
                    q[:num_decodes], memory, self._decodes, shape.window, self._longest
                )
            schedule = self._schedules[key]
        if self._starts is not None:
            with self._beside(num_decodes):
                self._prefill.attend(
                    q,
                    memory,
                    self._seqs,
                    self._starts,
                    shape,
                    self._prefill_longest,
                    out[num_decodes:],
                    scales,
                    None,
                )
        if num_decodes:
            rows, result = q[:num_decodes], out[:num_decodes]
            self._decode.attend(rows, memory, self._decodes, None, shape, self._longest, result, scales, schedule)
        self._join()
        return out

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

    def _last(
        self, q: Tensor, memory: Tensor, shape: AttentionShape, indices: LogitsIndices, scales: Tensor | None
    ) -> Tensor:
        """Computes only the rows that need logits, each as a decode."""
        seqs = PagedKVMetadata(indices.slots, indices.positions, self._seqs.tables)
        out = q.new_empty((len(indices.rows), q.shape[1] * q.shape[2]))
        if len(out):
            rows = q.index_select(0, indices.rows)
            schedule = self._decode.schedule(rows, memory, seqs, shape.window, self._longest)
            self._decode.attend(rows, memory, seqs, None, shape, self._longest, out, scales, schedule)
        return out

    def _scales(self, layer: int, qkv: Tensor, rotation: Tensor | None, norm: RMSNorm | None) -> Tensor | None:
        """Returns the scales [2] of 8-bit K and V, or None. The first step with a prefill measures them."""
        pool = self._pool
        if pool.scales is None:
            return None
        if pool.scales_pending and self._starts is not None:
            heads = self._shapes[layer].num_heads
            rotated = heads + self._shapes[layer].kv_heads
            qk = qkv[:, :rotated].clone() if norm is None else norm(qkv[:, :rotated])
            if rotation is not None:
                apply_rope_reference(qk, rotation)
            pool.measure_scales(layer, qk[:, heads:], qkv[:, rotated:])
        return pool.scales[layer]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
