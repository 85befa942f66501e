"""What attention on a GPU is told of the rows of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.kv_cache.kv_types import check_kv_dtype


@dataclass(frozen=True, slots=True)
class PagedKVMetadata:
    """Where the sequences of a step lie, on the device."""

    slots: Tensor  # [rows] int64, row of `tables`; below 0: a row that pads, of no sequence
    positions: Tensor  # [rows] int64, of the new token; all up to it are attended to
    tables: Tensor  # [slots, blocks] int32

    def check(self, rows: int) -> None:
        """Raises ValueError."""
        if self.slots.shape != (rows,) or self.positions.shape != (rows,) or self.tables.ndim != 2:
            raise ValueError(f"slots {list(self.slots.shape)}, positions {list(self.positions.shape)} for {rows} rows")
        if self.slots.dtype != torch.int64 or self.positions.dtype != torch.int64 or self.tables.dtype != torch.int32:
            raise ValueError(
                f"expected int64, int64, int32: {self.slots.dtype}, {self.positions.dtype}, {self.tables.dtype}"
            )
        if self.slots.stride(0) != 1 or self.positions.stride(0) != 1 or self.tables.stride(1) != 1:
            raise ValueError("slots, positions and the rows of tables must be contiguous")


def check_attention_inputs(q: Tensor, layer: Tensor, seqs: PagedKVMetadata, scales: Tensor | None) -> None:
    """Of any attention over the pool: q [rows, heads, head_dim], rows may be strided; layer [num_blocks, 2, kv_heads,
    block_size, head_dim]; scales as in `check_kv_dtype`. Raises ValueError."""
    rows, heads, head_dim = q.shape
    seqs.check(rows)
    if layer.shape[4] != head_dim or heads % layer.shape[2] or not layer.is_contiguous():
        raise ValueError(f"q {list(q.shape)} does not fit a layer {list(layer.shape)}, or that is not contiguous")
    check_kv_dtype(q, layer, scales)
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        raise ValueError(f"the heads of a row must be contiguous, got strides {q.stride()}")


def check_query_ranges(q: Tensor, starts: Tensor, out: Tensor) -> None:
    """Of rows that belong to sequences: starts [num_seqs + 1] int32; out [rows from starts[0] on, heads * head_dim],
    contiguous and of q's dtype. Raises ValueError."""
    rows, heads, head_dim = q.shape
    if starts.ndim != 1 or starts.dtype != torch.int32 or starts.stride(0) != 1:
        raise ValueError(f"starts must be [num_seqs + 1] int32, got {list(starts.shape)} {starts.dtype}")
    fits = out.ndim == 2 and out.shape[1] == heads * head_dim and len(out) <= rows
    if not fits or not out.is_contiguous() or out.dtype != q.dtype:
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit q {list(q.shape)}, or is not contiguous")
