"""Slot, position and block table of each row of a step, and the checks that attention kernels have in common.

A layer of the paged KV cache is [num_blocks, 2, kv_heads, block_size, head_dim], the 2 being K and V.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.kv_cache.kv_types import check_kv_dtype


@dataclass(frozen=True, slots=True)
class PagedKVMetadata:
    """Slot, position and block table of each row of a step, on the device."""

    slots: Tensor  # [rows] int64, row of `tables`; below 0: a padding row
    positions: Tensor  # [rows] int64, of the new token, which attends to all positions up to it
    tables: Tensor  # [slots, blocks] int32

    def part(self, rows: slice) -> "PagedKVMetadata":
        return PagedKVMetadata(self.slots[rows], self.positions[rows], self.tables)

    def check(self, rows: int) -> None:
        """Raises ValueError for other shapes and dtypes."""
        if self.slots.shape != (rows,) or self.positions.shape != (rows,) or self.tables.ndim != 2:
            raise ValueError(f"slots {list(self.slots.shape)}, positions {list(self.positions.shape)} for {rows} rows")
        if self.slots.dtype != torch.int64 or self.positions.dtype != torch.int64 or self.tables.dtype != torch.int32:
            raise ValueError(
                f"expected int64, int64, int32: {self.slots.dtype}, {self.positions.dtype}, {self.tables.dtype}"
            )
        if self.slots.stride(0) != 1 or self.positions.stride(0) != 1 or self.tables.stride(1) != 1:
            raise ValueError("slots, positions and the rows of tables must be contiguous")


def check_attention_inputs(q: Tensor, layer: Tensor, metadata: PagedKVMetadata, scales: Tensor | None) -> None:
    """Checks q [rows, heads, head_dim], whose rows may be strided, against a layer of the cache and its scales.

    Raises ValueError.
    """
    rows, heads, head_dim = q.shape
    metadata.check(rows)
    if layer.shape[4] != head_dim or heads % layer.shape[2] or not layer.is_contiguous():
        raise ValueError(f"q {list(q.shape)} does not fit a layer {list(layer.shape)}, or that is not contiguous")
    check_kv_dtype(q, layer, scales)
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        raise ValueError(f"the heads of a row must be contiguous, got strides {q.stride()}")


def check_query_ranges(q: Tensor, query_start_loc: Tensor, out: Tensor) -> None:
    """Checks query_start_loc [num_seqs + 1] int32 and out [rows - query_start_loc[0], heads * head_dim], contiguous.

    Raises ValueError.
    """
    rows, heads, head_dim = q.shape
    if query_start_loc.ndim != 1 or query_start_loc.dtype != torch.int32 or query_start_loc.stride(0) != 1:
        raise ValueError(
            f"query_start_loc must be [num_seqs + 1] int32, got {list(query_start_loc.shape)} {query_start_loc.dtype}"
        )
    fits = out.ndim == 2 and out.shape[1] == heads * head_dim and len(out) <= rows
    if not fits or not out.is_contiguous() or out.dtype != q.dtype:
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit q {list(q.shape)}, or is not contiguous")
