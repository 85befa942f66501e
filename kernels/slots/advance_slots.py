"""The end of a step: each slot takes its new token, waits or ends, and the outcome is stored for the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.slots.slot_state import MAX_STOP_IDS, NUM_RESULTS, Field, SlotState, StepInputs
from blockyard.kernels.tensor_checks import check_tensor

_TILE = 128


@triton.jit(do_not_specialize=["count", "capacity"])
def _advance_slots_kernel(
    fields_ptr, step_ptr, slots_ptr, ids_ptr, tokens_ptr, best_ptr, ready_ptr, eos_ptr, counts_ptr, results_ptr,
    count, num_slots, ring, capacity,
    NUM_EOS: tl.constexpr, COUNTED: tl.constexpr, MAX_STOP_IDS: tl.constexpr, NEXT: tl.constexpr,
    POSITION: tl.constexpr, KNOWN: tl.constexpr, MAX_KNOWN: tl.constexpr, LIVE: tl.constexpr, IGNORE_EOS: tl.constexpr,
    NUM_STOPS: tl.constexpr, STOPS: tl.constexpr, AWAITS_HOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # program i: tile i of the rows; numbers of outcomes are from SlotOutcome
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < count
    slot = tl.load(slots_ptr + row, mask=inside, other=-1)
    on = slot >= 0
    field = fields_ptr + slot
    token = tl.load(tokens_ptr + row, mask=on, other=0).to(tl.int32)
    best = tl.load(best_ptr + row, mask=on, other=0.0)
    position = tl.load(field + POSITION * num_slots, mask=on, other=0)
    if COUNTED:
        position += tl.load(counts_ptr + row, mask=on, other=0)
    else:
        position += 1
    most = tl.load(field + MAX_KNOWN * num_slots, mask=on, other=0)
    ignores = tl.load(field + IGNORE_EOS * num_slots, mask=on, other=0) != 0
    ends = on & (slot < 0)
    for i in tl.static_range(NUM_EOS):
        ends |= token == tl.load(eos_ptr + i)
    stops = on & (slot < 0)
    num_stops = tl.load(field + NUM_STOPS * num_slots, mask=on, other=0)
    if tl.max(num_stops, 0) > 0:
        for i in tl.static_range(MAX_STOP_IDS):
            stop = tl.load(field + (STOPS + i) * num_slots, mask=on & (i < num_stops), other=-1)
            stops |= token == stop
    outcome = tl.where(position + 1 >= most, 5, 2)
    outcome = tl.where(stops, 4, outcome)
    outcome = tl.where(ends & ~ignores, 3, outcome)
    finite = (best > float("-inf")) & (best < float("inf"))  # NaN is neither
    outcome = tl.where(finite, outcome, tl.where(best == float("-inf"), 8, 7))
    waits = tl.load(field + AWAITS_HOST * num_slots, mask=on, other=0) != 0
    waits |= tl.load(ready_ptr + row, mask=on, other=1) == 0
    outcome = tl.where(waits, 9, outcome)
    outcome = tl.where(position >= most, 6, outcome)
    outcome = tl.where(position < tl.load(field + KNOWN * num_slots, mask=on, other=0), 1, outcome)
    has_token = on & (outcome >= 2) & (outcome <= 5)
    waits = on & (outcome == 9)
    last = tl.load(ids_ptr + row, mask=waits, other=0).to(tl.int32)
    position -= waits.to(tl.int32)
    tl.store(field + POSITION * num_slots, position, mask=on)
    tl.store(field + LIVE * num_slots, ((outcome == 1) | (outcome == 2) | waits).to(tl.int32), mask=on)
    tl.store(field + NEXT * num_slots, tl.where(waits, last, token), mask=has_token | waits)
    tl.store(field + KNOWN * num_slots, position + 1, mask=has_token)
    out = results_ptr + (tl.load(step_ptr) & (ring - 1)) * (3 * capacity) + row  # a step number may be negative
    tl.store(out, tl.where(on, outcome, 0), mask=inside)
    tl.store(out + capacity, token, mask=inside)
    tl.store(out + 2 * capacity, position, mask=inside)


def advance_slots(
    state: SlotState,
    inputs: StepInputs,
    tokens: Tensor,
    best: Tensor,
    ready: Tensor,
    eos: Tensor,
    results: Tensor,
    counts: Tensor | None = None,
) -> None:
    """Gives each row's slot its new token, and ends slots at stop tokens, at their length, or at non-finite logits.

    tokens [rows] int64 and best [rows] float32 come from `sample_tokens`; ready [rows] int32: 0 where the slot
    waits, as every slot does with AWAITS_HOST that would take a token; eos [n] int32 are the model's EOS ids;
    counts [rows] int32 is how many tokens each row computed, None for one each. results [ring, NUM_RESULTS,
    capacity] int32, on the device or in pinned memory, gets the rows' SlotOutcome, token and number of computed
    tokens at [step % ring]; ring is a power of two, so that the numbers of steps may wrap around. A slot takes a token
    only once all its known tokens are computed. Raises ValueError for other shapes and dtypes.
    """
    state.check()
    count = len(inputs.slots)
    inputs.check(count)
    if results.ndim != 3 or results.shape[1] != NUM_RESULTS or results.shape[2] < count:
        raise ValueError(f"results: expected [ring, {NUM_RESULTS}, {count} or more], got {list(results.shape)}")
    if len(results).bit_count() != 1:
        raise ValueError(f"results: expected a power of two of steps, got {len(results)}")
    if results.dtype != torch.int32 or not results.is_contiguous():
        raise ValueError(f"results: expected contiguous int32, got {results.dtype}, strides {results.stride()}")
    check_tensor("tokens", tokens, (count,), torch.int64)
    check_tensor("best", best, (count,), torch.float32)
    check_tensor("ready", ready, (count,), torch.int32)
    check_tensor("eos", eos, (eos.numel(),), torch.int32)
    if counts is not None:
        check_tensor("counts", counts, (count,), torch.int32)
    if count == 0:
        return
    _advance_slots_kernel[(ceil_div(count, _TILE),)](
        state.fields, state.step, inputs.slots, inputs.token_ids, tokens, best, ready, eos,
        inputs.slots if counts is None else counts, results, count, state.fields.shape[1], len(results),
        results.shape[2],
        NUM_EOS=len(eos), COUNTED=counts is not None, MAX_STOP_IDS=MAX_STOP_IDS, NEXT=int(Field.NEXT),
        POSITION=int(Field.POSITION), KNOWN=int(Field.KNOWN), MAX_KNOWN=int(Field.MAX_KNOWN), LIVE=int(Field.LIVE),
        IGNORE_EOS=int(Field.IGNORE_EOS), NUM_STOPS=int(Field.NUM_STOPS), STOPS=int(Field.STOPS),
        AWAITS_HOST=int(Field.AWAITS_HOST), TILE=_TILE, num_warps=1,
    )  # fmt: skip
