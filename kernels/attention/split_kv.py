"""Split-KV scheduling: divides the keys of a decode step's sequences among programs, once a step, for all layers.

Lengths are known on the device alone, so a kernel does it there. The tiles of keys of all sequences are put in line,
and each program of a K/V head gets as many of them as the others, in order (stream-K, https://arxiv.org/abs/2301.03598).
So one long sequence among short ones is shared by many programs, and none works longer than the rest. A split is what
one program has of one sequence. Where whole sequences for each program are nearly as even, no sequence is split.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.attention_tiles import oldest_key
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

BLOCK_N = 64  # keys of a tile
SLACK = 11  # eighths of a program's fair share that whole sequences may be
_ITEMS = 16
_WORK_FIELDS = 5


@dataclass(frozen=True, slots=True)
class SplitKVSchedule:
    """The splits of one step and window, and the buffers that decode attention uses with them in every layer."""

    work: Tensor  # [5, max_splits] int32: row, slot, first key, end of keys, splits of the row
    starts: Tensor  # [programs + 1] int32, first split of each program; the last is the number of splits
    row_splits: Tensor  # [2, rows] int32: first split, number of splits
    partial_out: Tensor  # [max_splits, heads, head_dim] float32
    lse: Tensor  # [max_splits, heads] float32, log2 of the sum of exponentials
    semaphores: Tensor  # [kv_heads, rows] int32: number of splits stored, 0 between layers

    @property
    def programs(self) -> int:
        """The programs of each K/V head."""
        return len(self.starts) - 1


@triton.jit
def _key_range(row, slots_ptr, positions_ptr, rows, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Returns the slot, first key and end of keys of a row."""
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int32)
    end = tl.load(positions_ptr + row, mask=slot >= 0, other=-1).to(tl.int32) + 1
    first = tl.zeros_like(end)
    if WINDOW > 0:
        first = oldest_key(tl.maximum(end - 1, 0), WINDOW, CHUNKED)
    return slot, first, end


@triton.jit
def _put_in_line(tiles, exists, rows, programs, SLACK: tl.constexpr):
    """Returns the first place of each row in the line of tiles, and the number of places that a program has."""
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), programs), 1)
    longest = tl.maximum(tl.max(tiles, 0), 1)
    whole = tl.cdiv(share, longest) * longest
    fits = (whole * 8 <= share * SLACK) & (rows <= programs * (whole // longest))
    taken = tl.where(exists, tl.where(fits, longest, tiles), 0)  # if they fit, every row takes as many as the longest
    return tl.cumsum(taken, 0) - taken, tl.where(fits, whole, share)


@triton.jit(
    do_not_specialize=["rows", "max_splits", "programs"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"]
)
def _split_kv_kernel(
    slots_ptr, positions_ptr, work_ptr, starts_ptr, row_splits_ptr, semaphores_ptr, rows, max_splits, programs,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK_N: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    # program i: splits, and starts of programs, i * ITEMS to (i + 1) * ITEMS - 1; every program reads all rows
    row = tl.arange(0, ROWS)
    exists = row < rows
    slot, first, end = _key_range(row, slots_ptr, positions_ptr, rows, WINDOW, CHUNKED)
    tiles = tl.cdiv(end - first, BLOCK_N)
    place, share = _put_in_line(tiles, exists, rows, programs, SLACK)
    first_program = place // share
    # a padding row has one empty split
    num_splits = tl.where(exists, tl.maximum((place + tiles - 1) // share - first_program + 1, 1), 0)
    first_split = tl.cumsum(num_splits, 0) - num_splits
    end_split = first_split + num_splits

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owns = (first_split[None, :] <= item[:, None]) & (item[:, None] < end_split[None, :])
    part = item[:, None] - first_split[None, :] + first_program[None, :]  # the program that has the split
    begin = first[None, :] + tl.maximum(part * share - place[None, :], 0) * BLOCK_N
    stop = tl.minimum(first[None, :] + ((part + 1) * share - place[None, :]) * BLOCK_N, end[None, :])
    inside = item < max_splits
    tl.store(work_ptr + item, tl.sum(tl.where(owns, row[None, :], 0), 1), mask=inside)
    tl.store(work_ptr + max_splits + item, tl.sum(tl.where(owns, slot[None, :], 0), 1), mask=inside)
    tl.store(work_ptr + 2 * max_splits + item, tl.sum(tl.where(owns, begin, 0), 1), mask=inside)
    tl.store(work_ptr + 3 * max_splits + item, tl.sum(tl.where(owns, stop, 0), 1), mask=inside)
    tl.store(work_ptr + 4 * max_splits + item, tl.sum(tl.where(owns, num_splits[None, :], 0), 1), mask=inside)
    # padding rows at the end of the line belong to the last program
    in_earlier = item[:, None] - tl.minimum(first_program, programs - 1)[None, :]
    starts = tl.sum(tl.minimum(tl.maximum(in_earlier, 0), num_splits[None, :]), 1)
    tl.store(starts_ptr + item, starts, mask=item <= programs)
    if tl.program_id(0) == 0:
        tl.store(row_splits_ptr + row, first_split, mask=exists)
        tl.store(row_splits_ptr + rows + row, num_splits, mask=exists)
        for head in range(KV_HEADS):
            tl.store(semaphores_ptr + head * rows + row, 0, mask=exists)


def schedule_split_kv(
    metadata: PagedKVMetadata,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rules: ScoreRules,
    max_seq_len: int,
    programs: int,
) -> SplitKVSchedule:
    """Schedules attention to the keys that `rules` let a row see, for `programs` programs of all K/V heads together.

    `max_seq_len` bounds the rows' positions and only sizes buffers. Raises ValueError for other shapes and dtypes.
    """
    rows, device = len(metadata.slots), metadata.slots.device
    metadata.check(rows)
    num_keys = rules.num_keys(max_seq_len)
    of_head = max(programs // kv_heads, 1)
    max_splits = max(min(rows + of_head, rows * ceil_div(num_keys, BLOCK_N)), 1)
    of_head = min(of_head, max_splits)
    schedule = SplitKVSchedule(
        torch.empty((_WORK_FIELDS, max_splits), dtype=torch.int32, device=device),
        torch.empty(of_head + 1, dtype=torch.int32, device=device),
        torch.empty((2, rows), dtype=torch.int32, device=device),
        torch.empty((max_splits, heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((max_splits, heads), dtype=torch.float32, device=device),
        torch.empty((kv_heads, rows), dtype=torch.int32, device=device),
    )
    width = max(next_power_of_2(rows), 256)  # so that few kernels are compiled
    _split_kv_kernel[(ceil_div(max(max_splits, of_head + 1), _ITEMS),)](
        metadata.slots, metadata.positions, schedule.work, schedule.starts, schedule.row_splits, schedule.semaphores,
        rows, max_splits, of_head,
        WINDOW=rules.window or 0, CHUNKED=rules.chunked, KV_HEADS=kv_heads, ROWS=width, ITEMS=_ITEMS, BLOCK_N=BLOCK_N,
        SLACK=SLACK, num_warps=8 if width <= 256 else 16,
    )  # fmt: skip
    return schedule
