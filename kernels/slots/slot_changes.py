"""What a step has changed of its slots, as rows of words: the slots of another device take them over."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.slots.slot_state import NUM_CHANGE_WORDS, Field, SlotState

_TILE = 128


@triton.jit(do_not_specialize=["count"])
def _collect_changes_kernel(
    fields_ptr, step_ptr, slots_ptr, changes_ptr, count, num_slots, ring, capacity,
    NEXT: tl.constexpr, POSITION: tl.constexpr, KNOWN: tl.constexpr, LIVE: tl.constexpr, WORDS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    # program i: tile i of the rows
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < count
    slot = tl.load(slots_ptr + row, mask=inside, other=-1).to(tl.int32)
    on = slot >= 0
    place = (tl.load(step_ptr) & (ring - 1)) * capacity + row  # a step number may be negative
    out, field = changes_ptr + place * WORDS, fields_ptr + slot
    tl.store(out, slot, mask=inside)
    tl.store(out + 1, tl.load(field + NEXT * num_slots, mask=on, other=0), mask=inside)
    tl.store(out + 2, tl.load(field + POSITION * num_slots, mask=on, other=0), mask=inside)
    tl.store(out + 3, tl.load(field + KNOWN * num_slots, mask=on, other=0), mask=inside)
    tl.store(out + 4, tl.load(field + LIVE * num_slots, mask=on, other=0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _write_changes_kernel(
    fields_ptr, changes_ptr, count, num_slots,
    NEXT: tl.constexpr, POSITION: tl.constexpr, KNOWN: tl.constexpr, LIVE: tl.constexpr, WORDS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    # program i: tile i of the rows
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    change = changes_ptr + row * WORDS
    slot = tl.load(change, mask=row < count, other=-1)
    on = slot >= 0
    field = fields_ptr + slot
    tl.store(field + NEXT * num_slots, tl.load(change + 1, mask=on, other=0), mask=on)
    tl.store(field + POSITION * num_slots, tl.load(change + 2, mask=on, other=0), mask=on)
    tl.store(field + KNOWN * num_slots, tl.load(change + 3, mask=on, other=0), mask=on)
    tl.store(field + LIVE * num_slots, tl.load(change + 4, mask=on, other=0), mask=on)


_FIELDS = {"NEXT": int(Field.NEXT), "POSITION": int(Field.POSITION), "KNOWN": int(Field.KNOWN), "LIVE": int(Field.LIVE)}


def collect_changes(state: SlotState, slots: Tensor, changes: Tensor) -> None:
    """Stores slot and `CHANGED_FIELDS` of each slot in changes[step % ring], to be called behind `advance_slots`.

    slots [rows] int64, below 0: none, which is stored; changes [ring, capacity, NUM_CHANGE_WORDS] int32 with a power of
    two as ring, on the device. Raises ValueError for other shapes and dtypes.
    """
    state.check()
    count = len(slots)
    if changes.ndim != 3 or changes.shape[1] < count or len(changes).bit_count() != 1:
        raise ValueError(f"changes: expected [power of two, {count} or more, ...], got {list(changes.shape)}")
    _check(changes)
    if slots.ndim != 1 or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots: expected contiguous int64, got {slots.dtype}, strides {slots.stride()}")
    if count:
        _collect_changes_kernel[(ceil_div(count, _TILE),)](
            state.fields, state.step, slots, changes, count, state.fields.shape[1], len(changes), changes.shape[1],
            **_FIELDS, WORDS=NUM_CHANGE_WORDS, TILE=_TILE, num_warps=1,
        )  # fmt: skip


def write_changes(state: SlotState, changes: Tensor) -> None:
    """Gives slots what a step on another device has changed of its own.

    changes [rows, NUM_CHANGE_WORDS] int32, rows of `collect_changes`. Slots must lie in the state: not checked. Raises
    ValueError for other shapes and dtypes.
    """
    state.check()
    _check(changes)
    if len(changes):
        _write_changes_kernel[(ceil_div(len(changes), _TILE),)](
            state.fields, changes, len(changes), state.fields.shape[1],
            **_FIELDS, WORDS=NUM_CHANGE_WORDS, TILE=_TILE, num_warps=1,
        )  # fmt: skip


def _check(changes: Tensor) -> None:
    if changes.dtype != torch.int32 or not changes.is_contiguous() or changes.shape[-1] != NUM_CHANGE_WORDS:
        shape = f"{list(changes.shape)} of {changes.dtype}, strides {changes.stride()}"
        raise ValueError(f"changes: expected contiguous int32, {NUM_CHANGE_WORDS} words a row, got {shape}")
