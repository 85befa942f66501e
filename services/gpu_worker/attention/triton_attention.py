"""A decoder's steps on a GPU, as Triton kernels. Loaded by name, on a GPU alone."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.fused_decode import SplitSemaphores, fused_decode, supports_fused_decode
from blockyard.kernels.attention.paged_decode import paged_decode, schedule_decode
from blockyard.kernels.attention.paged_prefill import paged_prefill
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.step import LogitsIndices
from blockyard.shared.errors import LoadError

LARGEST_HEAD = 256


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def check_head_size(head_dim: int) -> None:
    """Raises LoadError for one that the kernels do not take."""
    if head_dim % 2 or head_dim > LARGEST_HEAD:
        raise LoadError(
            f"a head size of {head_dim} is not supported on a GPU, only even ones up to {LARGEST_HEAD} are; "
            "--device cpu takes others"
        )


class MixedAttention:
    """For `Step.attend` of any step: rows of decodes first, one a sequence, then those of prefills. The pool is read
    where it lies; lengths are known on the device alone."""

    def __init__(
        self,
        pool: KVPool,
        slots: Tensor,
        positions: Tensor,
        tables: Tensor,
        starts: Tensor | None = None,
        num_decodes: int = 0,
        longest: int | None = None,
        logits_indices: LogitsIndices | None = None,
        reach: int | None = None,
        arrivals: SplitSemaphores | None = None,
    ) -> None:
        """slots and positions [rows], tables [slots, blocks] as in PagedKVMetadata. starts [prefills + 1] int32: the
        row that each prefill begins at, `num_decodes` the first, and `rows`; None: all rows are decodes. No position is
        beyond `longest`, None: as far as the tables reach; none of a prefill's beyond `reach`, None: the same.
        `logits_indices`: what the last layer computes, None: all rows. `arrivals`: few decodes may be one kernel."""
        self._pool, self._shape, self._logits_indices = pool, pool.shape, logits_indices
        self._seqs, self._starts = PagedKVMetadata(slots, positions, tables), starts
        self._num_decodes = len(slots) if starts is None else num_decodes
        self._decodes = PagedKVMetadata(slots[: self._num_decodes], positions[: self._num_decodes], tables)
        width = tables.shape[1] * pool.block_size
        self._longest = min(longest or width, width)
        self._prefill_reach = reach or self._longest
        few = starts is None and logits_indices is None and supports_fused_decode(len(slots), self._longest)
        self._arrivals = arrivals if few else None
        self._schedules: dict[int | None, SplitKVSchedule | None] = {}  # of each window
        self._side: torch.cuda.Stream | None = None  # that prefills of this layer run on

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        memory, shape, num_decodes = self._pool.memory[layer], self._shape, self._num_decodes
        scales = self._scales(layer, qkv, rotation, norm)
        if self._arrivals is not None:
            window, scale, longest = shape.attention[layer].window, shape.attention[layer].scale, self._longest
            return fused_decode(
                qkv, memory, self._seqs, rotation, norm, scale, window, longest, self._arrivals, scales=scales
            )
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        rope_write_kv(
            qkv, memory, self._seqs, rotation, weight, eps, scales, batch_invariant=self._pool.batch_invariant
        )
        q, window = qkv[:, : shape.num_heads], shape.windows[layer]
        if self._logits_indices is not None and layer == shape.num_layers - 1:
            return self._last(q, memory, window, self._logits_indices, scales)
        out = qkv.new_empty((len(qkv), shape.num_heads * shape.head_dim))
        if num_decodes and window not in self._schedules:  # the first layer of a window cuts for all
            self._schedules[window] = self._schedule_decodes(q[:num_decodes], memory, self._decodes, window)
        with self._beside(num_decodes):
            if self._starts is not None:
                self._prefill(q, memory, window, out[num_decodes:], scales)
        if num_decodes:
            schedule = self._schedules[window]
            self._decode(q[:num_decodes], memory, self._decodes, window, out[:num_decodes], scales, schedule)
        self._join()
        return out

    @contextlib.contextmanager
    def _beside(self, num_decodes: int) -> Iterator[None]:
        """In a CUDA graph, attention of prefills runs beside that of decodes: a short prompt fills few processors.
        Launched one by one, the host's calls for a second stream would take longer than is saved."""
        is_mixed = num_decodes > 0 and self._starts is not None
        if not is_mixed or self._pool.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
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
        self, q: Tensor, memory: Tensor, window: int | None, logits_indices: LogitsIndices, scales: Tensor | None
    ) -> Tensor:
        """The wanted rows alone: each of its own, as decodes are."""
        seqs = PagedKVMetadata(logits_indices.slots, logits_indices.positions, self._seqs.tables)
        out = q.new_empty((len(logits_indices.rows), q.shape[1] * q.shape[2]))
        if len(out):
            chosen = q.index_select(0, logits_indices.rows)
            self._decode(
                chosen, memory, seqs, window, out, scales, self._schedule_decodes(chosen, memory, seqs, window)
            )
        return out

    def _schedule_decodes(
        self, q: Tensor, memory: Tensor, seqs: PagedKVMetadata, window: int | None
    ) -> SplitKVSchedule | None:
        return schedule_decode(q, memory, seqs, window, self._longest)

    def _decode(
        self,
        q: Tensor,
        memory: Tensor,
        seqs: PagedKVMetadata,
        window: int | None,
        out: Tensor,
        scales: Tensor | None,
        schedule: SplitKVSchedule | None,
    ) -> None:
        scale = self._shape.attention[0].scale
        paged_decode(q, memory, seqs, scale, window, self._longest, out, schedule=schedule, scales=scales)

    def _prefill(self, q: Tensor, memory: Tensor, window: int | None, out: Tensor, scales: Tensor | None) -> None:
        seqs, starts = self._seqs, self._starts
        assert starts is not None
        paged_prefill(
            q, memory, seqs, starts, self._shape.attention[0].scale, window, self._prefill_reach, out, scales=scales
        )

    def _scales(self, layer: int, qkv: Tensor, rotation: Tensor | None, norm: RMSNorm | None) -> Tensor | None:
        """[2], of K and V stored in 8 bits."""
        pool = self._pool
        if pool.scales is None:
            return None
        if pool.scales_pending and self._starts is not None:
            heads, rotated = self._shape.num_heads, self._shape.num_heads + self._shape.kv_heads
            qk = qkv[:, :rotated].clone() if norm is None else norm(qkv[:, :rotated])
            if rotation is not None:
                apply_rope_reference(qk, rotation)
            pool.measure_scales(layer, qk[:, heads:], qkv[:, rotated:])
        return pool.scales[layer]


class InvariantAttention(MixedAttention):
    """What a row gets is a function of that row alone, to the last bit: --batch-invariant."""

    def _schedule_decodes(self, q: Tensor, memory: Tensor, seqs: PagedKVMetadata, window: int | None) -> None:
        return None

    def _decode(
        self,
        q: Tensor,
        memory: Tensor,
        seqs: PagedKVMetadata,
        window: int | None,
        out: Tensor,
        scales: Tensor | None,
        schedule: SplitKVSchedule | None,
    ) -> None:
        reach = self._reach()
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        batch_invariant_attention(
            q, memory, seqs, starts, self._shape.attention[0].scale, window, reach, out, True, scales=scales
        )

    def _prefill(self, q: Tensor, memory: Tensor, window: int | None, out: Tensor, scales: Tensor | None) -> None:
        seqs, starts, reach = self._seqs, self._starts, self._reach()
        assert starts is not None
        batch_invariant_attention(
            q, memory, seqs, starts, self._shape.attention[0].scale, window, reach, out, False, scales=scales
        )

    def _reach(self) -> int:
        """Splits are as long as this asks for: it may not depend on what a step is known to need."""
        return self._seqs.tables.shape[1] * self._pool.block_size


def mixed_attention(
    pool: KVPool,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
    starts: Tensor | None = None,
    num_decodes: int = 0,
    longest: int | None = None,
    logits_indices: LogitsIndices | None = None,
    reach: int | None = None,
    arrivals: SplitSemaphores | None = None,
) -> MixedAttention:
    """As the pool is to be read."""
    if pool.batch_invariant:
        return InvariantAttention(pool, slots, positions, tables, starts, num_decodes, longest, logits_indices, reach)
    return MixedAttention(pool, slots, positions, tables, starts, num_decodes, longest, logits_indices, reach, arrivals)
