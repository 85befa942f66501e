"""The inputs of a decode step: each row's next token, position and slot, gathered from the slot state."""

import triton
import triton.language as tl

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.slots.slot_state import Field, SlotState, StepInputs

_TILE = 128


@triton.jit(do_not_specialize=["count"])
def _gather_inputs_kernel(
    row_slots_ptr, fields_ptr, step_ptr, ids_ptr, positions_ptr, slots_ptr, index_ptr, sampled_slots_ptr, count,
    num_slots,
    NEXT: tl.constexpr, POSITION: tl.constexpr, KNOWN: tl.constexpr, LIVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # program i: tile i of the rows
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < count
    slot = tl.load(row_slots_ptr + row, mask=inside, other=-1)
    live = tl.load(fields_ptr + LIVE * num_slots + slot, mask=slot >= 0, other=0) != 0
    token = tl.load(fields_ptr + NEXT * num_slots + slot, mask=live, other=0)
    position = tl.load(fields_ptr + POSITION * num_slots + slot, mask=live, other=0)
    tl.store(ids_ptr + row, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=inside)
    tl.store(slots_ptr + row, tl.where(live, slot, -1).to(tl.int64), mask=inside)
    tl.store(index_ptr + row, position.to(tl.int64) + 1, mask=inside)
    samples = live & (tl.load(fields_ptr + KNOWN * num_slots + slot, mask=live, other=0) <= position + 1)
    tl.store(sampled_slots_ptr + row, tl.where(samples, slot, -1).to(tl.int64), mask=inside)


def gather_inputs(state: SlotState, inputs: StepInputs) -> None:
    """Fills `inputs` from the slots in `state.row_slots`, and increments the step count.

    Padding rows, and rows of a slot that is not live, get token 0, position 0 and slot -1. Slots must lie in the state:
    not checked on device. Raises ValueError for other shapes and dtypes.
    """
    state.check()
    count = len(inputs.slots)
    inputs.check(count)
    if count > len(state.row_slots):
        raise ValueError(f"{count} rows, the state has {len(state.row_slots)}")
    if count == 0:
        return
    _gather_inputs_kernel[(ceil_div(count, _TILE),)](
        state.row_slots, state.fields, state.step, inputs.token_ids, inputs.positions, inputs.slots, inputs.index,
        inputs.sampled_slots, count, state.fields.shape[1],
        NEXT=int(Field.NEXT), POSITION=int(Field.POSITION), KNOWN=int(Field.KNOWN), LIVE=int(Field.LIVE), TILE=_TILE,
        num_warps=1,
    )  # fmt: skip
