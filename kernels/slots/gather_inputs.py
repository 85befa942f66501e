"""The inputs of a decode step: each row's next token, position and slot, gathered from the slot state."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.slots.slot_state import Field, SlotState
from blockyard.kernels.tensor_checks import check_tensor

_TILE = 128
NUM_INPUT_WORDS = 5  # int64 fields of StepInputs


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step, [rows] int64 each."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor  # below 0: a padding row, or a slot that has ended
    index: Tensor  # index in its sequence of the token to be sampled
    sampled_slots: Tensor  # the slot, below 0 also where the next token is known already

    @classmethod
    def make(cls, capacity: int, device: torch.device) -> "StepInputs":
        return cls(
            *torch.zeros((NUM_INPUT_WORDS, -(-capacity // 2) * 2), dtype=torch.int64, device=device)[:, :capacity]
        )

    def first(self, rows: int) -> "StepInputs":
        return StepInputs(
            *(one[:rows] for one in (self.token_ids, self.positions, self.slots, self.index, self.sampled_slots))
        )

    def check(self, rows: int) -> None:
        """Raises ValueError."""
        for name in ("token_ids", "positions", "slots", "index", "sampled_slots"):
            check_tensor(name, getattr(self, name), (rows,), torch.int64)


def gather_inputs_reference(state: SlotState, inputs: StepInputs) -> None:
    slots = state.row_slots[: len(inputs.slots)].long()
    live = (slots >= 0) & (state.fields[Field.LIVE][slots.clamp(min=0)] != 0)
    for field, out in ((Field.NEXT, inputs.token_ids), (Field.POSITION, inputs.positions)):
        out.copy_(torch.where(live, state.fields[field][slots.clamp(min=0)].long(), 0))
    inputs.slots.copy_(torch.where(live, slots, -1))
    inputs.index.copy_(inputs.positions + 1)
    inputs.sampled_slots.copy_(
        torch.where(state.fields[Field.KNOWN][slots.clamp(min=0)] <= inputs.index, inputs.slots, -1)
    )
    state.step.add_(1)


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
