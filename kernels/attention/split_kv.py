"""Cuts the sequences of a decode step into pieces of work, once a step, for the decode attention of every layer.

Lengths are known on the device alone, so it cuts them there: into pieces about as long as the whole step's keys need
to keep every program busy, so that one long sequence among short ones is shared by all. Splits are in the order of
their length, the longest first, so that programs that take turns end at about the same time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

TILE = 64  # keys; lengths of pieces are multiples
LEAST = 64  # keys of a piece, if its sequence has that many
USUAL = 2048  # a piece may have so many, if there are programs for the rest
ROUNDS = 2  # beyond that, pieces a program
SLACK = 11  # eighths of a program's fair share of keys that a piece may have: a little more is not worth a second one
_ITEMS = 16
_OTHERS = 32  # rows that others are compared with at once
_FIELDS = 5


@dataclass(frozen=True, slots=True)
class SplitKVSchedule:
    """Of one step and window; what decode attention keeps between its programs is here too, and serves every layer."""

    fields: Tensor  # [5, most] int32: row, slot, first key, end of keys, pieces of the row
    count: Tensor  # [1] int32
    of_row: Tensor  # [2, rows] int32: first piece, pieces
    partial: Tensor  # [most, heads, head_dim] float32
    weight: Tensor  # [most, heads] float32
    arrived: Tensor  # [kv_heads, rows] int32: pieces that are done, 0 between layers
    programs: int


@triton.jit
def _keys_of(row, slots_ptr, positions_ptr, rows, WINDOW: tl.constexpr):
    """Slot, first key and end of keys."""
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int32)
    end = tl.load(positions_ptr + row, mask=slot >= 0, other=-1).to(tl.int32) + 1
    first = tl.zeros_like(end)
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    return slot, first, end


@triton.jit
def _pieces_of(keys, exists, split, TILE: tl.constexpr):
    """How many, and their keys. A row that pads has an empty one."""
    pieces = tl.where(exists, tl.maximum(tl.cdiv(keys, split), 1), 0)
    return pieces, tl.cdiv(tl.cdiv(keys, tl.maximum(pieces, 1)), TILE) * TILE


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _split_kv_kernel(
    slots_ptr,
    positions_ptr,
    fields_ptr,
    count_ptr,
    of_row_ptr,
    arrived_ptr,
    rows,
    most,
    programs,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    USUAL: tl.constexpr,
    ROUNDS: tl.constexpr,
    SLACK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    # program i finds pieces i * ITEMS to (i + 1) * ITEMS - 1; all of them look at every row
    row = tl.arange(0, ROWS)
    exists = row < rows
    slot, first, end = _keys_of(row, slots_ptr, positions_ptr, rows, WINDOW)
    keys = end - first
    fair = tl.cdiv(tl.sum(keys.to(tl.int64), 0) * KV_HEADS, programs)
    split = tl.maximum(tl.maximum(LEAST, tl.cdiv(fair, ROUNDS)), tl.minimum(fair * SLACK // 8, USUAL))
    split = (tl.cdiv(split, TILE) * TILE).to(tl.int32)
    pieces, length = _pieces_of(keys, exists, split, TILE)
    since = tl.zeros_like(pieces)
    for start in range(0, rows, OTHERS):
        other = start + tl.arange(0, OTHERS)
        _, its_first, its_end = _keys_of(other, slots_ptr, positions_ptr, rows, WINDOW)
        its_pieces, its_length = _pieces_of(its_end - its_first, other < rows, split, TILE)
        longer = its_length[None, :] > length[:, None]
        before = longer | ((its_length[None, :] == length[:, None]) & (other[None, :] < row[:, None]))
        since += tl.sum(tl.where(before, its_pieces[None, :], 0), 1)
    until = since + pieces

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    its = (since[None, :] <= item[:, None]) & (item[:, None] < until[None, :])
    begin = tl.sum(tl.where(its, (first - since * length)[None, :], 0), 1)
    each = tl.sum(tl.where(its, length[None, :], 0), 1)
    stop = tl.sum(tl.where(its, end[None, :], 0), 1)
    begin += item * each
    stop = tl.minimum(begin + each, stop)
    inside = item < most
    tl.store(fields_ptr + item, tl.sum(tl.where(its, row[None, :], 0), 1), mask=inside)
    tl.store(fields_ptr + most + item, tl.sum(tl.where(its, slot[None, :], 0), 1), mask=inside)
    tl.store(fields_ptr + 2 * most + item, begin, mask=inside)
    tl.store(fields_ptr + 3 * most + item, stop, mask=inside)
    tl.store(fields_ptr + 4 * most + item, tl.sum(tl.where(its, pieces[None, :], 0), 1), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.sum(pieces, 0))
        tl.store(of_row_ptr + row, since, mask=exists)
        tl.store(of_row_ptr + rows + row, pieces, mask=exists)
        for head in range(KV_HEADS):
            tl.store(arrived_ptr + head * rows + row, 0, mask=exists)


def schedule_split_kv(
    seqs: PagedKVMetadata, heads: int, kv_heads: int, head_dim: int, window: int | None, longest: int, programs: int
) -> SplitKVSchedule:
    """For attention to the last `window` keys, None all, of rows whose positions are at most `longest`, which only
    sizes buffers, in so many programs. Raises ValueError for other shapes and dtypes."""
    rows, device = len(seqs.slots), seqs.slots.device
    seqs.check(rows)
    seen = longest if window is None else min(window, longest)
    shared = ceil_div(ROUNDS * programs, kv_heads)  # what is cut off beyond one piece a row, at most
    most = max(min(rows + shared, rows * ceil_div(seen, LEAST)), 1)
    pieces = SplitKVSchedule(
        torch.empty((_FIELDS, most), dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty((2, rows), dtype=torch.int32, device=device),
        torch.empty((most, heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((most, heads), dtype=torch.float32, device=device),
        torch.empty((kv_heads, rows), dtype=torch.int32, device=device),
        min(programs, most * kv_heads),
    )
    width = max(next_power_of_2(rows), 256)  # few kernels to compile
    _split_kv_kernel[(ceil_div(most, _ITEMS),)](
        seqs.slots,
        seqs.positions,
        pieces.fields,
        pieces.count,
        pieces.of_row,
        pieces.arrived,
        rows,
        most,
        programs,
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        ROWS=width,
        ITEMS=_ITEMS,
        TILE=TILE,
        LEAST=LEAST,
        USUAL=USUAL,
        ROUNDS=ROUNDS,
        SLACK=SLACK,
        OTHERS=_OTHERS,
        num_warps=8 if width <= 256 else 16,
    )
    return pieces
