"""The references of the kernels on slots, in numpy: for tensors in host memory. Imports no Triton."""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from blockyard.kernels.slots.slot_state import CHANGED_FIELDS, MAX_STOP_IDS, Field, SlotOutcome, SlotState, StepInputs

Words = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer[Any]]


def scatter_words_reference(arena: Tensor, pairs: Tensor, count: int) -> None:
    words: Words = pairs.numpy()
    arena.numpy()[words[0, :count]] = words[1, :count]


def gather_inputs_reference(state: SlotState, inputs: StepInputs) -> None:
    fields: Words = state.fields.numpy()
    slots: Words = state.row_slots.numpy()[: len(inputs.slots)]
    live = (slots >= 0) & (fields[Field.LIVE, slots] != 0)
    position = np.where(live, fields[Field.POSITION, slots], 0)
    inputs.token_ids.numpy()[:] = np.where(live, fields[Field.NEXT, slots], 0)
    inputs.positions.numpy()[:] = position
    inputs.slots.numpy()[:] = np.where(live, slots, -1)
    inputs.index.numpy()[:] = position + 1
    samples = live & (fields[Field.KNOWN, slots] <= position + 1)
    inputs.sampled_slots.numpy()[:] = np.where(samples, slots, -1)
    step: Words = state.step.numpy()
    step += 1  # wraps around


def advance_slots_reference(
    state: SlotState,
    inputs: StepInputs,
    tokens: Tensor,
    best: Tensor,
    ready: Tensor,
    eos: Tensor,
    results: Tensor,
    counts: Tensor | None,
) -> None:
    out: Words = results[int(state.step) % len(results)].numpy()[:, : len(inputs.slots)]
    all_slots: Ints = inputs.slots.numpy()
    rows = slice(None) if all_slots.min(initial=0) >= 0 else np.flatnonzero(all_slots >= 0)
    out[0] = SlotOutcome.NOTHING
    slots, fields, token = all_slots[rows], state.fields.numpy(), tokens.numpy()[rows]
    position = fields[Field.POSITION, slots] + (1 if counts is None else counts.numpy()[rows])
    outcome = slot_outcomes(fields[:, slots], position, token, best.numpy()[rows], ready.numpy()[rows], eos.numpy())
    has_token = (outcome >= SlotOutcome.TOKEN) & (outcome <= SlotOutcome.LENGTH)
    waits = outcome == SlotOutcome.WAITING
    position -= waits
    fields[Field.POSITION, slots] = position
    fields[Field.LIVE, slots] = (outcome == SlotOutcome.PART) | (outcome == SlotOutcome.TOKEN) | waits
    if has_token.all():
        fields[Field.NEXT, slots] = token
        fields[Field.KNOWN, slots] = position + 1
    else:
        chosen = slots[has_token]
        fields[Field.NEXT, chosen] = token[has_token]
        fields[Field.KNOWN, chosen] = position[has_token] + 1
        fields[Field.NEXT, slots[waits]] = inputs.token_ids.numpy()[rows][waits]
    out[0, rows], out[1, rows], out[2, rows] = outcome, token, position


def collect_changes_reference(state: SlotState, slots: Tensor, changes: Tensor) -> None:
    fields: Words = state.fields.numpy()
    out: Words = changes[int(state.step) % len(changes)].numpy()[: len(slots)]
    chosen: Ints = slots.numpy()
    out[:, 0] = chosen
    for column, one in enumerate(CHANGED_FIELDS, 1):
        out[:, column] = np.where(chosen >= 0, fields[one, chosen], 0)


def write_changes_reference(state: SlotState, changes: Tensor) -> None:
    fields, rows = state.fields.numpy(), changes.numpy()
    rows = rows[rows[:, 0] >= 0]
    for column, one in enumerate(CHANGED_FIELDS, 1):
        fields[one, rows[:, 0]] = rows[:, column]


def slot_outcomes(
    slots: Words, position: Integers, token: Ints, best: npt.NDArray[np.float32], ready: Words, eos: Words
) -> npt.NDArray[np.int64]:
    """SlotOutcome of each row: slots [NUM_FIELDS, rows], the rows' fields, the others [rows] but for eos.

    position: number of computed tokens, with the step's.
    """
    most = slots[Field.MAX_KNOWN]
    outcome = np.where(position + 1 >= most, SlotOutcome.LENGTH, SlotOutcome.TOKEN)
    if slots[Field.NUM_STOPS].any():
        listed = np.arange(MAX_STOP_IDS)[:, None] < slots[Field.NUM_STOPS]
        stops = ((slots[Field.STOPS : Field.STOPS + MAX_STOP_IDS] == token) & listed).any(0)
        outcome[stops] = SlotOutcome.STOP
    ends = (token == eos[:, None]).any(0)
    if ends.any():
        outcome[ends & (slots[Field.IGNORE_EOS] == 0)] = SlotOutcome.END_OF_SEQUENCE
    finite = np.isfinite(best)
    if not finite.all():
        outcome[~finite] = np.where(best[~finite] == -np.inf, SlotOutcome.NONE_ALLOWED, SlotOutcome.NOT_FINITE)
    outcome[(slots[Field.AWAITS_HOST] != 0) | (ready == 0)] = SlotOutcome.WAITING
    outcome[position >= most] = SlotOutcome.FULL
    outcome[position < slots[Field.KNOWN]] = SlotOutcome.PART
    return outcome
