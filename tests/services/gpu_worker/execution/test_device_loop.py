"""Steps ahead of the host give the same tokens and finish reasons as lockstep, with any plans in flight."""

import math
import random
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Driver, Stream
from reference_ops import run_ahead
from slot_plans import collected, greedy, plan, prompt_of, started
from ties import Score, Ties
from tiny_models import start

from blockyard.services.gpu_worker.execution.cuda.decode_graphs import IN_FLIGHT
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerEvents
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.warm_up import warm_up
from blockyard.shared.messages import FinishReason, FullBlock, KVSend, Sampling, SlotRun, StepPlan


@pytest.fixture(scope="module")
def waiting(folder: Path, logits_of: Score) -> Runner:
    runner = start(folder, max_model_len=64)
    run_ahead(runner, capacity=6, waits=True)
    return runner


STREAMS: list[tuple[list[int], Sampling]] = [
    (prompt_of(9, 1), greedy(max_tokens=30)),
    (prompt_of(1, 2), Sampling(max_tokens=25, temperature=1.0, seed=7)),
    (prompt_of(12, 3), Sampling(max_tokens=25, temperature=0.7, top_p=0.9, seed=2**63 + 5, ignore_eos=True)),
    (prompt_of(17, 4), Sampling(max_tokens=20, temperature=2.0, top_k=40, min_p=0.01, seed=3)),
    (prompt_of(50, 5), greedy(max_tokens=40)),  # the context ends it
    (prompt_of(6, 6), greedy(max_tokens=20, stop_token_ids=list(range(40, 60)))),  # more stop ids than a slot holds
    (prompt_of(5, 7), greedy(max_tokens=12, repetition_penalty=1.3, num_logprobs=2)),
    (
        prompt_of(21, 14),  # bad words: on the host
        Sampling(max_tokens=20, temperature=1.2, top_k=50, seed=17, bad_words=[[60, 61], [7, 8, 9]], num_logprobs=1),
    ),
    (prompt_of(7, 8), greedy(max_tokens=1)),
    (prompt_of(4, 9), greedy(max_tokens=0)),
    (
        prompt_of(8, 11),
        greedy(
            max_tokens=15,
            logit_bias=[(8, 3.0), (9, -2.0)],
            bad_words=[[5]],
            presence_penalty=0.5,
            frequency_penalty=0.3,
            num_logprobs=0,
        ),
    ),
    (
        prompt_of(6, 12),
        Sampling(max_tokens=15, temperature=0.9, seed=5, allowed_token_ids=[*range(10, 60)], min_tokens=8),
    ),
    (prompt_of(9, 13), greedy(max_tokens=12, bad_words=[[60, 61]], repetition_penalty=1.2)),  # bad words: on the host
    (prompt_of(11, 10), Sampling(max_tokens=30, temperature=1.5, seed=11, stop_token_ids=[*range(100, 108)])),
]


@pytest.fixture(scope="module")
def alone(plain: Runner) -> list[Stream]:
    streams = []
    for prompt, sampling in STREAMS:
        driver = Driver(plain)
        streams.append(driver.add(prompt, sampling))
        driver.run()
    ends = {(s.finish, s.stop_token is None) for s in streams}
    assert ends == {(FinishReason.LENGTH, True), (FinishReason.STOP, True), (FinishReason.STOP, False)}
    return streams


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    depth=st.sampled_from([0, 1, 3, 9]),
    chunk=st.sampled_from([1, 5, 1000]),
    num_slots=st.integers(2, 6),
    picked=st.lists(st.integers(0, len(STREAMS) - 1), min_size=1, max_size=7),
    preempt=st.lists(st.integers(1, 25), max_size=2),
    seed=st.integers(0, 99),
)
def test_the_same_tokens_and_finish_reasons_as_in_lockstep(
    ahead: Runner,
    alone: list[Stream],
    logits_of: Score,
    depth: int,
    chunk: int,
    num_slots: int,
    picked: list[int],
    preempt: list[int],
    seed: int,
) -> None:
    check_streams(ahead, alone, logits_of, depth, chunk, num_slots, picked, preempt, seed)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    depth=st.sampled_from([0, 1, 3, 9]),
    chunk=st.sampled_from([1, 5, 1000]),
    picked=st.lists(st.integers(0, len(STREAMS) - 1), min_size=1, max_size=7),
    preempt=st.lists(st.integers(1, 25), max_size=2),
    seed=st.integers(0, 99),
)
def test_the_same_tokens_where_rows_wait(
    waiting: Runner,
    alone: list[Stream],
    logits_of: Score,
    depth: int,
    chunk: int,
    picked: list[int],
    preempt: list[int],
    seed: int,
) -> None:
    """A row without a token computes its last token again; it is counted, penalized and reported once."""
    driver = check_streams(waiting, alone, logits_of, depth, chunk, 6, picked, preempt, seed)
    assert driver.num_waits > 0 or sum(len(s.output) for s in driver.streams) < 20


def check_streams(
    ahead: Runner,
    alone: list[Stream],
    logits_of: Score,
    depth: int,
    chunk: int,
    num_slots: int,
    picked: list[int],
    preempt: list[int],
    seed: int,
) -> Driver:
    driver = Driver(ahead, num_slots=num_slots, depth=depth, chunk=chunk, seed=seed)
    random.seed(seed)
    streams = [driver.add(*STREAMS[i], preempt_at=tuple(preempt) if i % 2 else ()) for i in picked]
    driver.run()
    ties = Ties()
    for i, stream in zip(picked, streams, strict=True):
        want = alone[i]
        if stream.output != want.output:
            ties.compare(f"stream {i}", stream.prompt, want.output, stream.output, logits_of)
        else:
            assert (stream.finish, stream.stop_token, stream.detail) == (want.finish, want.stop_token, want.detail)
            for entry, other in zip(stream.logprobs, want.logprobs, strict=True):
                assert (entry.token_id, entry.rank, entry.top_ids) == (other.token_id, other.rank, other.top_ids)
                assert [entry.logprob, *entry.top_logprobs] == pytest.approx(
                    [other.logprob, *other.top_logprobs], abs=1e-4
                )
    ties.check()
    assert len(driver.free_blocks) == ahead.geometry.num_blocks
    return driver


def test_plans_are_in_flight_and_a_slot_that_ended_takes_no_part_in_later_ones(ahead: Runner) -> None:
    ahead.reset(4)
    loop = ahead.loop
    starts = [started(0, prompt_of(1), greedy(max_tokens=3), [3]), started(2, prompt_of(1, 4), greedy(), [5, 9])]
    for number in range(1, IN_FLIGHT + 1):
        assert ahead.can_launch()
        ahead.launch(plan(number, 0, 2, starts=starts if number == 1 else []))
        if number == 3:
            written = ahead.pool.runs[0][:, 3].clone()
    assert loop.in_flight == IN_FLIGHT
    assert not ahead.can_launch()
    assert torch.equal(ahead.pool.runs[0][:, 3], written), "after its end it wrote no KV"
    results = collected(ahead)
    assert [sorted(results[n]) for n in (1, 3, 4, 8)] == [[0, 2], [0, 2], [2], [2]]
    assert results[3][0].finish is FinishReason.LENGTH
    assert [results[n][2].num_computed for n in range(1, 9)] == list(range(1, 9))


def test_logits_that_are_not_finite_fail_only_their_slot_and_its_blocks_are_scrubbed(ahead: Runner) -> None:
    ahead.reset(4)
    first, other = prompt_of(3), prompt_of(3, 1)
    expected = []
    for bad in (False, True):
        ahead.reset(4)
        starts = [started(0, first, greedy(), [6, 7]), started(1, other, greedy(), [8, 9])]
        ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 3), SlotRun(1, 3)]))
        collected(ahead)
        if bad:
            with torch.inference_mode():
                ahead.pool.runs[0][:, 6, :, :, 0] = math.nan
        ahead.launch(plan(2, 0, 1, full_blocks=[FullBlock(6, b"x" * 16)]))
        ahead.launch(plan(3, 0, 1))
        ahead.launch(plan(4, 1, ends=[0]))  # cancelled before its failure was known
        results = collected(ahead)
        tokens = [results[n][1].token_ids for n in (2, 3, 4)]
        if not bad:
            expected = tokens
            continue
        assert tokens == expected
        failed = results[2][0]
        assert (failed.finish, failed.detail) == (FinishReason.FAILED, "the model's logits are not finite")
        assert 0 not in results[3]
        assert bool(ahead.pool.runs[0][:, 6].isfinite().all())
        assert 6 not in ahead.block_hashes.blocks_and_hashes()[0]


def test_a_slot_is_reused_while_results_of_its_previous_sequence_are_in_flight(ahead: Runner) -> None:
    """The scheduler waits before it reuses a slot, but the device loop must not depend on that."""
    ahead.reset(4)
    ahead.launch(plan(1, 0, starts=[started(0, prompt_of(1), greedy(), [3])]))
    ahead.launch(plan(2, 0))
    prompt = prompt_of(1, 5)
    ahead.launch(plan(3, 0, ends=[0], starts=[started(0, prompt, greedy(), [4])]))
    ahead.launch(plan(4, 0))
    results = collected(ahead)
    assert [results[n][0].num_computed for n in (1, 2, 3, 4)] == [1, 2, 1, 2]
    table = ahead.batch.slots
    assert table.token_ids[0, :3].tolist() == prompt + results[3][0].token_ids + results[4][0].token_ids


class SeenEvent:
    """Sees which layers of block 6 have KV when it is recorded. Complete once a test says so."""

    def __init__(self, pool: KVPool, seen: "list[SeenEvent]") -> None:
        self._pool, self._seen = pool, seen
        self.layers: list[bool] = []
        self.is_complete = False

    def record(self) -> None:
        self.layers = self._pool.runs[0][:, 6].flatten(1).any(1).tolist()
        self._seen.append(self)

    def query(self) -> bool:
        return self.is_complete


def test_a_step_that_sends_blocks_tells_which_layers_are_stored(ahead: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SeenEvent] = []
    make = partial(LayerEvents, make_event=lambda: SeenEvent(ahead.pool, seen))
    monkeypatch.setattr("blockyard.services.gpu_worker.execution.cuda.cuda_steps.LayerEvents", make)
    num_layers = ahead.pool.shape.num_layers
    for groups in (8, 2):
        monkeypatch.setattr("blockyard.services.gpu_worker.execution.cuda.stored_layers.GROUPS", groups)
        ahead.reset(4)
        seen.clear()
        with torch.inference_mode():
            ahead.pool.runs[0][:, 6].zero_()
        starts = [started(0, prompt_of(3), greedy(), [6, 7])]
        send = KVSend(1, 2, 1, b"", [6], [0], is_last=True)
        stored = ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 3)], sends=[send]))
        ends = [group.layers.stop for group in stored]
        assert ends == ([1, 2, 3] if groups == 8 else [2, 3]) and [group.layers.start for group in stored] == [
            0, *ends[:-1],
        ]  # fmt: skip
        for event, end in zip(seen, ends, strict=True):
            assert event.layers == [True] * end + [False] * (num_layers - end)
        assert not any(group.is_stored() for group in stored)
        seen[0].is_complete = True
        assert [group.is_stored() for group in stored] == [True] + [False] * (len(stored) - 1)
        assert not ahead.launch(msgspec.structs.replace(plan(2, 0), sends=[send])), "a step of decodes alone"
        collected(ahead)
    seen.clear()
    ahead.reset(4)
    assert not ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 3)])) and not seen, "nothing to send"
    collected(ahead)


def test_reset_waits_and_drops_what_is_in_flight(ahead: Runner) -> None:
    ahead.reset(4)
    names = [FullBlock(3, b"n" * 16)]
    ahead.launch(plan(1, 0, starts=[started(0, prompt_of(1), greedy(), [3])], full_blocks=names))
    ahead.launch(plan(2, 0))
    ahead.reset(2)
    assert (ahead.in_flight, ahead.collect()) == (0, [])
    assert 3 in ahead.block_hashes.blocks_and_hashes()[0], "the plan that named it has completed"
    ahead.launch(plan(1, 0))
    assert collected(ahead) == {1: {}}, "its slots are gone"


def test_a_plan_without_rows_completes_in_its_turn(ahead: Runner) -> None:
    ahead.reset(4)
    loop = ahead.loop
    starts = [started(0, prompt_of(1), greedy(), [3]), started(1, prompt_of(2, 3), greedy(), [4])]
    ahead.launch(plan(1, 0, starts=starts))
    ahead.launch(plan(2, ends=[1], starts=[started(1, prompt_of(1, 4), greedy(), [5])]))
    ahead.launch(plan(3, 0, 1))
    ahead.launch(plan(4, ends=[0, 1]))
    ahead.launch(plan(5, 0))
    assert loop.in_flight == 5
    results = collected(ahead)
    assert list(results) == [1, 2, 3, 4, 5]
    assert [sorted(results[n]) for n in results] == [[0], [], [0, 1], [], []]
    assert (results[3][0].num_computed, results[3][1].num_computed) == (2, 1)


def test_more_sequences_than_a_step_has_rows_fail(ahead: Runner) -> None:
    ahead.reset(100)
    starts = [started(slot, prompt_of(1, slot), greedy(), [3 + i]) for i, slot in enumerate((*range(7), 12))]
    ahead.launch(plan(1, *range(7), 12, starts=starts))
    results = collected(ahead)[1]
    assert [results[slot].detail for slot in (6, 12)] == [
        "more than 6 sequences in a step",
        "slot 12 is outside of 0 to 11",
    ]
    assert all(results[slot].token_ids for slot in range(6))
    ahead.launch(plan(2, *range(7)))
    assert sorted(collected(ahead)[2]) == [*range(6)]


@pytest.mark.parametrize("logits_edits", [True, False])
def test_which_slots_the_device_samples(folder: Path, logits_of: Score, logits_edits: bool) -> None:
    """The others wait for the host, and no step does."""
    ahead = start(folder, max_model_len=64)
    steps = run_ahead(ahead, capacity=6, logits_edits=logits_edits)
    ahead.reset(6)
    asked = [sampling for _, sampling in (STREAMS[0], *STREAMS[-4:])]  # the third one is sampled by the host
    starts = [started(i, prompt_of(3, i), sampling, [3 + i]) for i, sampling in enumerate(asked)]
    ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(i, 3) for i in range(len(asked))]))
    ahead.launch(plan(2, *range(len(asked))))
    assert ahead.in_flight == 2
    on_device = [True, True, True, False, True] if logits_edits else [True, False, False, False, True]
    assert list(steps.slots.samples_on_device[:5]) == on_device
    results = collected(ahead)[1]
    assert [bool(results[slot].token_ids) for slot in range(5)] == on_device


def test_the_same_tokens_without_logits_edits_on_the_device(
    folder: Path, alone: list[Stream], logits_of: Score
) -> None:
    """Penalties, edits of tokens and log-probabilities are those of rows that wait for the host."""
    ahead = start(folder, max_model_len=64)
    run_ahead(ahead, capacity=6, logits_edits=False)
    driver = check_streams(ahead, alone, logits_of, 1, 5, 6, [0, 2, 6, 7, 10, 11], [], 3)
    assert driver.num_waits > 0


def test_slots_with_logits_edits_sample_on_the_device_while_edit_rows_are_free(ahead: Runner) -> None:
    ahead.reset(12)
    loop = ahead.loop
    wants = greedy(repetition_penalty=1.5)
    starts = [started(i, prompt_of(2, i), wants, [3 + i]) for i in range(7)]
    ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 2)]))
    collected(ahead)
    able = loop.steps.slots.samples_on_device[:7].tolist()
    assert able == [True] * 6 + [False], "one for each row of a step"
    ahead.launch(StepPlan(1, 2, [2], [started(7, prompt_of(2), wants, [20])], [], [SlotRun(0, 1)]))
    collected(ahead)
    assert loop.steps.slots.samples_on_device[7], "the row of the one that ended"


@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 32}, {"num_gpu_blocks_override": 2, "max_model_len": 16}]
)
def test_warm_up_leaves_no_state_behind(folder: Path, logits_of: Score, limits: dict[str, int]) -> None:
    runner = start(folder, **({"max_model_len": 64} | limits))
    run_ahead(runner, capacity=6)
    names = [FullBlock(300, b"n" * 16)] if not limits else []
    runner.batch.block_hashes.add(names)
    assert warm_up(runner) > 1
    assert (runner.in_flight, runner.collect(), runner.block_hashes.blocks_and_hashes()[0]) == (
        0,
        [],
        [n.block for n in names],
    )
    assert bool(runner.pool.runs[0].isfinite().all())
    runner.reset(2)
    runner.launch(plan(1, 0, starts=[started(0, prompt_of(1), greedy(), [1])]))
    assert collected(runner)[1][0].num_computed == 1
