"""The state of slots on the device: written by pairs, gathered into rows, advanced by tokens; against plain torch."""

import math

import pytest
import torch
from torch import Tensor

from blockyard.kernels.int_math import wrap_int32
from blockyard.kernels.slots.advance_slots import advance_slots
from blockyard.kernels.slots.gather_inputs import gather_inputs
from blockyard.kernels.slots.record_step import record_step, record_step_reference
from blockyard.kernels.slots.scatter_words import scatter_words
from blockyard.kernels.slots.slot_changes import collect_changes, write_changes
from blockyard.kernels.slots.slot_references import (
    advance_slots_reference,
    collect_changes_reference,
    gather_inputs_reference,
    scatter_words_reference,
    write_changes_reference,
)
from blockyard.kernels.slots.slot_state import (
    MAX_STOP_IDS,
    NUM_CHANGE_WORDS,
    NUM_FIELDS,
    NUM_RESULTS,
    Field,
    SlotOutcome,
    SlotState,
    StepInputs,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
EOS = torch.tensor([7, 9], dtype=torch.int32, device=DEVICE)
RING, CAPACITY = 4, 150


def random_state(num_slots: int, seed: int) -> SlotState:
    """Slots in every state."""
    state = SlotState.make(num_slots, CAPACITY, 5, DEVICE)
    at = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (state.fields.shape[1],), generator=at, dtype=torch.int32).to(DEVICE)

    fields = state.fields
    fields[Field.POSITION] = draw(0, 50)
    fields[Field.KNOWN] = fields[Field.POSITION] + draw(1, 4)
    fields[Field.MAX_KNOWN] = fields[Field.POSITION] + draw(1, 6)
    fields[Field.AWAITS_HOST] = draw(0, 9) == 0
    fields[Field.LIVE], fields[Field.IGNORE_EOS] = draw(0, 4).clamp(max=1), draw(0, 2)
    fields[Field.NEXT], fields[Field.NUM_STOPS] = draw(0, 20), draw(0, MAX_STOP_IDS + 1)
    for i in range(MAX_STOP_IDS):
        fields[Field.STOPS + i] = draw(0, 20)
    order = torch.randperm(num_slots, generator=at)[: CAPACITY - 10].to(torch.int32)
    state.row_slots[: len(order)] = order.to(DEVICE)
    state.step.fill_(seed)
    return state


def copy_of(state: SlotState) -> SlotState:
    """In host memory, where the references run."""
    other = SlotState.make(state.fields.shape[1], len(state.row_slots), state.tables.shape[1], CPU)
    other.arena.copy_(state.arena)
    return other


def test_views_are_of_one_arena_and_hold_floats() -> None:
    state = SlotState.make(5, 3, 7, DEVICE)
    state.check()
    assert state.fields.shape == (NUM_FIELDS, 16)
    assert state.row_slots.tolist() == [-1] * 3
    for view in (state.fields, state.row_slots, state.step, state.tables):
        state.arena[state.offset(view)] = 77
        assert int(view.reshape(-1)[0]) == 77
    state.floats(Field.TOP_P)[2] = 0.25
    assert int(state.fields[Field.TOP_P, 2]) == 0x3E800000


@pytest.mark.parametrize("count", [0, 1, 3, 1024, 1500])
def test_scatter(count: int) -> None:
    at = torch.Generator().manual_seed(count)
    arena = torch.randint(-9, 9, (4000,), generator=at, dtype=torch.int32).to(DEVICE)
    pairs = torch.full((2, 2000), 10**9, dtype=torch.int32)  # elements after `count` must not be read
    pairs[0, :count] = torch.randperm(4000, generator=at)[:count]
    pairs[1, :count] = torch.randint(-(2**31), 2**31 - 1, (count,), generator=at, dtype=torch.int32)
    if DEVICE.type == "cuda":
        pairs = pairs.pin_memory()  # read in place
    want = arena.cpu()
    scatter_words_reference(want, pairs, count)
    scatter_words(arena, pairs, count)
    assert torch.equal(arena.cpu(), want)


@pytest.mark.parametrize("rows", [1, 17, 128, CAPACITY])
def test_gather(rows: int) -> None:
    state = random_state(200, rows)
    want_state, want, got = copy_of(state), StepInputs.make(rows, CPU), StepInputs.make(rows, DEVICE)
    got.slots.fill_(99)
    gather_inputs_reference(want_state, want)
    gather_inputs(state, got)
    for name in StepInputs.__slots__:
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    assert torch.equal(state.arena.cpu(), want_state.arena)
    live = want.slots >= 0
    assert rows == 1 or 0 < int(live.sum()) < rows, "both kinds of rows must be there"


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("rows", [1, 5, CAPACITY])
def test_advance(rows: int, counted: bool) -> None:
    state = random_state(200, rows + counted)
    now = StepInputs.make(rows, DEVICE)
    gather_inputs(state, now)
    at = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 20, (rows,), generator=at).to(DEVICE)
    best = torch.randn(rows, generator=at).to(DEVICE)
    best[2::7], best[3::11], best[4::13] = math.nan, -math.inf, math.inf
    counts = torch.randint(1, 4, (rows,), generator=at, dtype=torch.int32).to(DEVICE) if counted else None
    want_state = copy_of(state)
    want = torch.full((RING, NUM_RESULTS, CAPACITY), -5, dtype=torch.int32)
    got = want.pin_memory() if DEVICE.type == "cuda" else want.clone()
    ready = torch.randint(0, 9, (rows,), generator=at, dtype=torch.int32).to(DEVICE)
    rows_now = StepInputs(*(getattr(now, name).cpu() for name in StepInputs.__slots__))
    sampled = (tokens.cpu(), best.cpu(), ready.cpu(), EOS.cpu(), want, None if counts is None else counts.cpu())
    advance_slots_reference(want_state, rows_now, *sampled)
    advance_slots(state, now, tokens, best, ready, EOS, got, counts)
    torch.cuda.synchronize() if DEVICE.type == "cuda" else None
    assert torch.equal(state.arena.cpu(), want_state.arena)
    out, place = want[:, :, :rows], int(state.step) % RING
    assert torch.equal(got[:, 0, :rows], out[:, 0])
    told = out[place, 0] != SlotOutcome.NOTHING
    assert torch.equal(got[place][:, :rows][:, told], out[place][:, told])
    assert (got[[i for i in range(RING) if i != place]] == -5).all(), "results of other steps may not be read yet"
    if rows == CAPACITY:
        assert set(out[place, 0].tolist()) == {int(o) for o in SlotOutcome}, "every outcome must be there"


@pytest.mark.parametrize("rows", [1, 128, CAPACITY])
def test_slots_of_another_device_take_over_what_a_step_has_changed(rows: int) -> None:
    state, inputs = random_state(200, rows), StepInputs.make(rows, DEVICE)
    before = copy_of(state)
    gather_inputs(state, inputs)
    tokens, best = torch.full((rows,), 19, device=DEVICE), torch.ones(rows, device=DEVICE)
    results = torch.zeros((RING, NUM_RESULTS, CAPACITY), dtype=torch.int32, device=DEVICE)
    advance_slots(state, inputs, tokens, best, best.int(), EOS, results)
    want = torch.full((RING, CAPACITY, NUM_CHANGE_WORDS), -5, dtype=torch.int32)
    got = want.to(DEVICE)
    collect_changes(state, inputs.slots, got)
    collect_changes_reference(copy_of(state), inputs.slots.cpu(), want)
    assert torch.equal(got.cpu(), want)
    entry = got[int(state.step) % RING][:rows]
    other, want_other = random_state(200, rows), copy_of(before)
    write_changes(other, entry)
    write_changes_reference(want_other, entry.cpu())
    assert torch.equal(other.arena.cpu(), want_other.arena)
    assert torch.equal(other.fields, state.fields)
    assert rows == 1 or not torch.equal(before.fields, state.fields.cpu()), "something must have changed"


@pytest.mark.parametrize("last", [2**31 - 3, 2**32 - 3])
def test_numbers_of_steps_wrap_around(last: int) -> None:
    """Each step's results are where the host looks, whose numbers do not wrap, and nothing is written elsewhere."""
    state, inputs = random_state(200, 1), StepInputs.make(40, DEVICE)
    state.step.fill_(wrap_int32(last))
    tokens, best = torch.full((40,), 19, device=DEVICE), torch.ones(40, device=DEVICE)
    around = torch.zeros((3 * RING, NUM_RESULTS, CAPACITY), dtype=torch.int32, device=DEVICE)
    for number in range(last + 1, last + 7):
        around.fill_(-5)
        gather_inputs(state, inputs)
        advance_slots(state, inputs, tokens, best, best.int(), EOS, around[RING : 2 * RING])
        assert int(state.step) == wrap_int32(number)
        written = {place for place in range(3 * RING) if bool((around[place] != -5).any())}
        assert written == {RING + number % RING}, number


def test_int32_numbers() -> None:
    numbers = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -1]
    assert [wrap_int32(number) for number in numbers] == [0, 2**31 - 1, -(2**31), -1, 0, -1]


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1, -(2**31)])
def test_record_step(step: int) -> None:
    state = random_state(20, 3)
    state.step.fill_(step)
    got = torch.full((9,), 77, dtype=torch.int32)
    if DEVICE.type == "cuda":
        got = got.pin_memory()
    want = got.clone()
    for index in (0, 1, 5, 8):
        record_step_reference(state.step.cpu(), want, index)
        record_step(state.step, got, index)
        torch.cuda.synchronize() if DEVICE.type == "cuda" else None
        assert torch.equal(got, want)
    assert want.tolist().count(77) == 5


def test_a_model_without_an_end_of_sequence() -> None:
    state = random_state(200, 1)
    now, none = StepInputs.make(40, DEVICE), EOS[:0]
    gather_inputs(state, now)
    tokens = torch.full((40,), 7, device=DEVICE)
    results = torch.zeros((RING, NUM_RESULTS, CAPACITY), dtype=torch.int32, device=DEVICE)
    ones = torch.ones(40, device=DEVICE)
    advance_slots(state, now, tokens, ones, ones.int(), none, results)
    assert SlotOutcome.END_OF_SEQUENCE not in results[int(state.step) % RING, 0].tolist()


def test_wrong_arguments() -> None:
    state, rows = SlotState.make(8, 4, 2, DEVICE), StepInputs.make(4, DEVICE)
    tokens, best = rows.token_ids, torch.zeros(4, device=DEVICE)
    ready = best.int()
    results = torch.zeros((2, NUM_RESULTS, 4), dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="9 pairs of 4"):
        scatter_words(state.arena, results[0, :2], 9)
    with pytest.raises(ValueError, match="pairs: expected"):
        scatter_words(state.arena, results[0], 1)
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f"index: expected 0 to 2, got {index}"):
            record_step(state.step, state.arena[:3], index)
    with pytest.raises(ValueError, match="words: expected"):
        record_step(state.step, state.arena[:3].long(), 0)
    with pytest.raises(ValueError, match="step: expected"):
        record_step(state.arena[:2], state.arena[:3], 0)
    with pytest.raises(ValueError, match="5 rows, the state has 4"):
        gather_inputs(state, StepInputs.make(5, DEVICE))
    with pytest.raises(ValueError, match="results: expected"):
        advance_slots(state, rows, tokens, best, ready, EOS, results[:, :2])
    with pytest.raises(ValueError, match="results: expected a power of two of steps, got 3"):
        advance_slots(state, rows, tokens, best, ready, EOS, torch.zeros((3, NUM_RESULTS, 4)).int())
    with pytest.raises(ValueError, match="tokens: expected"):
        advance_slots(state, rows, tokens[:3], best, ready, EOS, results)
    with pytest.raises(ValueError, match="eos: expected"):
        advance_slots(state, rows, tokens, best, ready, EOS.long(), results)
    with pytest.raises(ValueError, match="counts: expected"):
        advance_slots(state, rows, tokens, best, ready, EOS, results, tokens)
    with pytest.raises(ValueError, match="ready: expected"):
        advance_slots(state, rows, tokens, best, ready[:3], EOS, results)
    changes = torch.zeros((2, 4, NUM_CHANGE_WORDS), dtype=torch.int32, device=DEVICE)
    for wrong in (changes[:, :3], changes[0], changes.repeat(3, 1, 1)):
        with pytest.raises(ValueError, match="changes: expected \\[power of two, 4 or more"):
            collect_changes(state, rows.slots, wrong)
    for wrong in (changes.long(), changes[..., 1:]):
        with pytest.raises(ValueError, match=f"{NUM_CHANGE_WORDS} words a row"):
            collect_changes(state, rows.slots, wrong)
        with pytest.raises(ValueError, match=f"{NUM_CHANGE_WORDS} words a row"):
            write_changes(state, wrong[0])
    with pytest.raises(ValueError, match="slots: expected"):
        collect_changes(state, rows.slots.int(), changes)
