"""Split-KV scheduling: divides the keys of a decode step's sequences into splits, once a step, for all layers.

Lengths are known on the device alone, so a kernel does it there. Splits are about as long as a program's fair share of
all keys in the step, so that one long sequence among short ones is shared by all programs. They are sorted by length,
the longest first, so that programs that take turns end at about the same time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

BLOCK_N = 64  # keys; lengths of splits are multiples
MIN_SPLIT = 64  # keys of a split, if its sequence has that many
USUAL_SPLIT = 2048  # keys that a split may have where there are programs for the rest
ROUNDS = 2  # beyond that, splits a program
SLACK = 11  # eighths of a program's fair share that a split may have: a little more is not worth another split
_ITEMS = 16
_OTHERS = 32  # rows that all rows are compared with at a time
_WORK_FIELDS = 5


@dataclass(frozen=True, slots=True)
class SplitKVSchedule:
    """The splits of one step and window, and the buffers that decode attention uses with them in every layer."""

    work: Tensor  # [5, max_splits] int32: row, slot, first key, end of keys, splits of the row
    count: Tensor  # [1] int32, number of splits
    row_splits: Tensor  # [2, rows] int32: first split, number of splits
    partial_out: Tensor  # [max_splits, heads, head_dim] float32
    lse: Tensor  # [max_splits, heads] float32, log2 of the sum of exponentials
    semaphores: Tensor  # [kv_heads, rows] int32: number of splits stored, 0 between layers
    programs: int


@triton.jit
def _key_range(row, slots_ptr, positions_ptr, rows, WINDOW: tl.constexpr):
    """Returns the slot, first key and end of keys of a row."""
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int32)
    end = tl.load(positions_ptr + row, mask=slot >= 0, other=-1).to(tl.int32) + 1
    first = tl.zeros_like(end)
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    return slot, first, end


@triton.jit
def _splits_of(keys, exists, split_len, BLOCK_N: tl.constexpr):
    """Returns the number of splits of a row and their length. A padding row has one empty split."""
    num_splits = tl.where(exists, tl.maximum(tl.cdiv(keys, split_len), 1), 0)
    return num_splits, tl.cdiv(tl.cdiv(keys, tl.maximum(num_splits, 1)), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _split_kv_kernel(
    slots_ptr, positions_ptr, work_ptr, count_ptr, row_splits_ptr, semaphores_ptr, rows, max_splits, programs,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr, USUAL_SPLIT: tl.constexpr, ROUNDS: tl.constexpr, SLACK: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    # program i: splits i * ITEMS to (i + 1) * ITEMS - 1; every program reads all rows
    row = tl.arange(0, ROWS)
    exists = row < rows
    slot, first, end = _key_range(row, slots_ptr, positions_ptr, rows, WINDOW)
    keys = end - first
    fair_share = tl.cdiv(tl.sum(keys.to(tl.int64), 0) * KV_HEADS, programs)
    split_len = tl.maximum(
        tl.maximum(MIN_SPLIT, tl.cdiv(fair_share, ROUNDS)), tl.minimum(fair_share * SLACK // 8, USUAL_SPLIT)
    )
    split_len = (tl.cdiv(split_len, BLOCK_N) * BLOCK_N).to(tl.int32)
    num_splits, length = _splits_of(keys, exists, split_len, BLOCK_N)
    first_split = tl.zeros_like(num_splits)
    for start in range(0, rows, OTHERS):
        other = start + tl.arange(0, OTHERS)
        _, other_first, other_end = _key_range(other, slots_ptr, positions_ptr, rows, WINDOW)
        other_splits, other_length = _splits_of(other_end - other_first, other < rows, split_len, BLOCK_N)
        longer = other_length[None, :] > length[:, None]
        before = longer | ((other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None]))
        first_split += tl.sum(tl.where(before, other_splits[None, :], 0), 1)
    end_split = first_split + num_splits

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owns = (first_split[None, :] <= item[:, None]) & (item[:, None] < end_split[None, :])
    begin = tl.sum(tl.where(owns, (first - first_split * length)[None, :], 0), 1)
    length_of_item = tl.sum(tl.where(owns, length[None, :], 0), 1)
    stop = tl.sum(tl.where(owns, end[None, :], 0), 1)
    begin += item * length_of_item
    stop = tl.minimum(begin + length_of_item, stop)
    inside = item < max_splits
    tl.store(work_ptr + item, tl.sum(tl.where(owns, row[None, :], 0), 1), mask=inside)
    tl.store(work_ptr + max_splits + item, tl.sum(tl.where(owns, slot[None, :], 0), 1), mask=inside)
    tl.store(work_ptr + 2 * max_splits + item, begin, mask=inside)
    tl.store(work_ptr + 3 * max_splits + item, stop, mask=inside)
    tl.store(work_ptr + 4 * max_splits + item, tl.sum(tl.where(owns, num_splits[None, :], 0), 1), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.sum(num_splits, 0))
        tl.store(row_splits_ptr + row, first_split, mask=exists)
        tl.store(row_splits_ptr + rows + row, num_splits, mask=exists)
        for head in range(KV_HEADS):
            tl.store(semaphores_ptr + head * rows + row, 0, mask=exists)


def schedule_split_kv(
    metadata: PagedKVMetadata,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    max_seq_len: int,
    programs: int,
) -> SplitKVSchedule:
    """Schedules attention to the last `window` keys, None all, for `programs` programs.

    `max_seq_len` bounds the rows' positions and only sizes buffers. Raises ValueError for other shapes and dtypes.
    """
    rows, device = len(metadata.slots), metadata.slots.device
    metadata.check(rows)
    num_keys = max_seq_len if window is None else min(window, max_seq_len)
    extra_splits = ceil_div(ROUNDS * programs, kv_heads)  # beyond one a row, at most
    max_splits = max(min(rows + extra_splits, rows * ceil_div(num_keys, MIN_SPLIT)), 1)
    schedule = SplitKVSchedule(
        torch.empty((_WORK_FIELDS, max_splits), dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty((2, rows), dtype=torch.int32, device=device),
        torch.empty((max_splits, heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((max_splits, heads), dtype=torch.float32, device=device),
        torch.empty((kv_heads, rows), dtype=torch.int32, device=device),
        min(programs, max_splits * kv_heads),
    )
    width = max(next_power_of_2(rows), 256)  # so that few kernels are compiled
    _split_kv_kernel[(ceil_div(max_splits, _ITEMS),)](
        metadata.slots, metadata.positions, schedule.work, schedule.count, schedule.row_splits,
        schedule.semaphores, rows, max_splits, programs,
        WINDOW=window or 0, KV_HEADS=kv_heads, ROWS=width, ITEMS=_ITEMS, BLOCK_N=BLOCK_N, MIN_SPLIT=MIN_SPLIT,
        USUAL_SPLIT=USUAL_SPLIT, ROUNDS=ROUNDS, SLACK=SLACK, OTHERS=_OTHERS, num_warps=8 if width <= 256 else 16,
    )  # fmt: skip
    return schedule
