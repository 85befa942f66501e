"""Constrained rows of steps that run ahead: the device takes masks, and rows without one wait."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_grammar_engine import constraint
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Driver, Stream
from reference_ops import ReferenceOps, run_ahead
from scripted_matcher import ScriptedMatcher
from ties import Score, Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start
from torch import Tensor

from blockyard.kernels.sampling.sampling_state import RowMasks
from blockyard.kernels.slots.slot_state import StepInputs
from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps
from blockyard.services.gpu_worker.execution.cuda.device_ops import mask_polls
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.structured_output import matcher_processes
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.shared.messages import FinishReason, Sampling, Stats

EOS, LENGTH, CAPACITY = 1, 12, 8
CHOICES = constraint(choices=[[5, 6, 7, 8], [5, 9], [40, 41, 42, 43, 44, 45]])
LIST = constraint(modulus=3, length=LENGTH)


def prompt_of(n: int) -> list[int]:
    return np.random.default_rng(n).integers(2, VOCAB, n).tolist()


STREAMS: list[tuple[list[int], Sampling]] = [
    (prompt_of(9), Sampling(20, 0.0, constraint=LIST)),
    (prompt_of(1), Sampling(20, 1.0, seed=7, constraint=LIST, num_logprobs=2)),
    (prompt_of(30), Sampling(20, 1.0, seed=8, constraint=CHOICES, ignore_eos=True, min_tokens=3)),
    (prompt_of(12), Sampling(20, 0.0, ignore_eos=True)),
    (prompt_of(7), Sampling(9, 0.7, seed=9, repetition_penalty=1.3, frequency_penalty=0.5, constraint=LIST)),
    (prompt_of(6), Sampling(16, 0.0, constraint=constraint(begin_after=[8], budget=4, modulus=2, length=8))),
    (prompt_of(5), Sampling(20, 0.0, constraint=LIST, allowed_token_ids=[1, *range(2, 90)], logit_bias=[(3, 9.0)])),
    (prompt_of(8), Sampling(12, 0.0, constraint=LIST, bad_words=[[60, 61]])),  # the host samples it
    (prompt_of(4), Sampling(14, 1.0, seed=1, stop_token_ids=[*range(30, 38)], constraint=LIST)),
]


class TroubledOps(ReferenceOps):
    """The matcher works or ends while the rows of a step are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.likely, self.kills = random.Random(0), 1.0, 0.0
        self.num_calls = 0

    def wait_for_masks(self, inputs: StepInputs, rows: RowMasks) -> None:
        self.num_calls += 1
        self._trouble()
        super().wait_for_masks(inputs, rows)
        self._trouble()

    def publish_sampled(self, tokens: Tensor, best: Tensor, inputs: StepInputs, rows: RowMasks) -> None:
        self._trouble()
        super().publish_sampled(tokens, best, inputs, rows)
        self._trouble()

    def _trouble(self) -> None:
        for matcher in [*ScriptedMatcher.running]:
            matcher.work(self.rng, self.likely)
            if matcher.num_first_masks and self.rng.random() < self.kills:
                matcher.is_alive = False  # the worker has not heard of it yet
                ScriptedMatcher.running.remove(matcher)


@pytest.fixture(scope="module", autouse=True)
def _scripted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher_processes, "MatcherClient", ScriptedMatcher)
        yield


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    yield
    ScriptedMatcher.works_at_once = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def logits_of(folder: Path) -> Score:
    score: Score = greedy_score(BY_NAME["llama"].save(folder))
    return score


@pytest.fixture(scope="module")
def alone(folder: Path, logits_of: Score) -> list[Stream]:
    """Each stream alone, sampled by the host."""
    runner, streams = start(folder, max_model_len=64), []
    for prompt, sampling in STREAMS:
        driver = Driver(runner)
        streams.append(driver.add(prompt, sampling))
        driver.run()
        assert not streams[-1].detail
    assert {len(stream.output) for stream in streams} > {LENGTH + 1, 20}
    return streams


@pytest.fixture(scope="module")
def ops() -> TroubledOps:
    return TroubledOps()


@pytest.fixture(scope="module")
def device(folder: Path, logits_of: Score, ops: TroubledOps) -> tuple[Runner, CudaSteps]:
    runner = start(folder, max_model_len=64)
    return runner, run_ahead(runner, CAPACITY, ops=ops)


@pytest.fixture
def ahead(device: tuple[Runner, CudaSteps], ops: TroubledOps) -> Runner:
    """A runner with a device whose matcher makes masks in time."""
    ops.likely, ops.kills = 1.0, 0.0
    ScriptedMatcher.works_at_once = False
    settled = Driver(device[0])  # a matcher may have ended with the last step of the test before
    settled.add(*STREAMS[0])
    settled.run()
    return device[0]


def matchers_of(runner: Runner) -> MatcherProcesses:
    assert runner.batch.matchers is not None
    return runner.batch.matchers


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    depth=st.sampled_from([0, 1, 3, 7]),
    chunk=st.sampled_from([1, 5, 1000]),
    picked=st.lists(st.integers(0, len(STREAMS) - 1), min_size=1, max_size=7),
    preempt=st.lists(st.integers(1, 15), max_size=2),
    trouble=st.tuples(st.sampled_from([0.15, 0.6, 1.0]), st.sampled_from([0.0, 0.0, 0.02, 0.1])),
    seed=st.integers(0, 99),
)
def test_late_masks_and_matchers_that_end_change_no_token(
    device: tuple[Runner, CudaSteps],
    ops: TroubledOps,
    alone: list[Stream],
    logits_of: Score,
    depth: int,
    chunk: int,
    picked: list[int],
    preempt: list[int],
    trouble: tuple[float, float],
    seed: int,
) -> None:
    ScriptedMatcher.works_at_once = False
    ops.rng, (ops.likely, ops.kills) = random.Random(seed), trouble
    driver, ties = Driver(device[0], num_slots=8, depth=depth, chunk=chunk, seed=seed), Ties()
    streams = [driver.add(*STREAMS[i], preempt_at=tuple(preempt) if i % 2 else ()) for i in picked]
    try:
        driver.run()
    finally:
        ScriptedMatcher.works_at_once = True
    for i, stream in zip(picked, streams, strict=True):
        want = alone[i]
        if stream.output != want.output:
            ties.compare(f"stream {i}", stream.prompt, want.output, stream.output, logits_of)
        assert (stream.finish, stream.stop_token, stream.detail) == (want.finish, want.stop_token, want.detail), i
        assert [one.top_ids for one in stream.logprobs] == [one.top_ids for one in want.logprobs]
    ties.check()


def test_masks_in_time_cost_no_step(ahead: Runner, alone: list[Stream]) -> None:
    matchers = matchers_of(ahead)
    masks, waits = matchers.num_masks, matchers.num_waits
    driver = Driver(ahead, depth=3)
    streams = [driver.add(*STREAMS[i]) for i in (0, 1, 2, 5, 6)]
    driver.run()
    assert [s.output for s in streams] == [alone[i].output for i in (0, 1, 2, 5, 6)]
    assert driver.num_waits == matchers.num_waits - waits == 0
    assert matchers.num_masks - masks == sum(len(s.output) for s in streams)


def test_steps_without_a_constrained_row_look_for_no_mask(ahead: Runner, ops: TroubledOps) -> None:
    before = ops.num_calls
    driver = Driver(ahead, depth=1)
    driver.add([5, 6, 7], Sampling(9, 0.0, ignore_eos=True))
    driver.run()
    assert ops.num_calls == before
    driver = Driver(ahead, depth=1)
    driver.add([5, 6, 7], Sampling(9, 0.0, ignore_eos=True))
    driver.add([5, 6, 7], Sampling(3, 0.0, constraint=LIST))
    driver.run()
    assert 3 <= ops.num_calls - before <= 6


def test_a_matcher_that_ends_with_tokens_in_flight_is_given_all_of_them(
    ahead: Runner, ops: TroubledOps, alone: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row waits, the next three steps sample, and the matcher ends before the host reads any of the four."""
    monkeypatch.setattr(matcher_processes, "OVERDUE_S", 1.0)
    driver = Driver(ahead, depth=4)
    stream = driver.add(*STREAMS[0])
    while len(stream.output) < 3:
        ops.likely = float(len(stream.output) < 2)
        driver.queued.append(driver.plan())
        driver.step()
    for likely in (0.0, 1.0, 1.0, 1.0):
        ops.likely = likely
        ahead.launch(driver.plan())
    for matcher in [*ScriptedMatcher.running]:
        matcher.is_alive = False
        ScriptedMatcher.running.remove(matcher)
    driver.run()
    assert (stream.output, stream.detail) == (alone[0].output, "")
    assert driver.num_waits >= 2


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_choice_that_gets_no_more_masks_fails_alone(ahead: Runner, depth: int) -> None:
    driver = Driver(ahead, depth=depth)
    good = driver.add([5, 6, 7], Sampling(12, 0.0, constraint=constraint(choices=[[5, 6, 7]])))
    failing = driver.add([5, 6, 7], Sampling(12, 0.0, constraint=constraint(choices=[[5, 6, 7]], fails_at=2)))
    none_common = driver.add([5], Sampling(12, 0.0, constraint=constraint(choices=[[5]]), allowed_token_ids=[6]))
    not_compiled = driver.add([5, 6], Sampling(12, 0.0, constraint=constraint(error="not a grammar")))
    plain = driver.add([5, 6, 7], Sampling(12, 0.0, ignore_eos=True))
    driver.run()
    assert (failing.output, failing.finish) == ([5, 6], FinishReason.FAILED)
    assert failing.detail == "the fake grammar fails here, at output token 3"
    assert none_common.detail == "the grammar allows no token of allowed_token_ids, at output token 1"
    assert not_compiled.detail == "not a grammar"
    assert [failing.status, none_common.status, not_compiled.status] == [400] * 3  # clients repeat what has a 500
    assert (good.output, good.finish) == ([5, 6, 7, EOS], FinishReason.STOP)
    assert len(plain.output) == 12


def test_a_mask_that_is_overdue_fails_its_choice(
    ahead: Runner, ops: TroubledOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other choices of the same engine get their masks from the next process."""
    monkeypatch.setattr(matcher_processes, "OVERDUE_S", 0.05)
    driver = Driver(ahead, depth=1)
    slow = driver.add([5, 6, 7], Sampling(12, 0.0, constraint=LIST))
    quick = driver.add([5, 6, 7], Sampling(400, 0.0, ignore_eos=True))
    while len(slow.output) < 4:
        driver.queued.append(driver.plan())
        driver.step()
    ops.likely = 0.0
    driver.run()
    assert slow.detail.startswith("the grammar engine guidance took more than 0 s for a mask, at output token ")
    assert (slow.finish, quick.finish) == (FinishReason.FAILED, FinishReason.LENGTH)
    assert ahead.count(Stats()).mask_waits_total > 0


def test_beside_a_prompt_with_many_log_probabilities(ahead: Runner, alone: list[Stream]) -> None:
    driver = Driver(ahead, depth=1, chunk=3)
    streams = [driver.add(*STREAMS[i]) for i in (0, 1, 5)]
    while len(streams[0].output) < 3:
        driver.queued.append(driver.plan())
        driver.step()
    ScriptedMatcher.works_at_once = True
    scored = driver.add(prompt_of(20), Sampling(3, 0.0, ignore_eos=True, num_prompt_logprobs=21))
    driver.run()
    assert [len(entry.top_ids) for entry in scored.prompt_logprobs.values()] == [21] * 19
    assert [s.output for s in streams] == [alone[i].output for i in (0, 1, 5)]


def test_a_slot_beyond_those_of_the_device_is_told_why(ahead: Runner) -> None:
    driver = Driver(ahead, num_slots=40)
    driver.free_slots = [33]
    beyond = driver.add([5], Sampling(4, 0.0, constraint=LIST))
    driver.run()
    assert beyond.detail == "slot 33 is outside of 0 to 15"


def test_without_masks_on_the_device_the_host_samples(folder: Path, alone: list[Stream]) -> None:
    runner = start(folder, max_model_len=64)
    run_ahead(runner, CAPACITY, masks=False)
    driver = Driver(runner, depth=3)
    streams = [driver.add(*STREAMS[i]) for i in (0, 1, 5)]
    driver.run()
    assert driver.num_waits > 0
    assert [s.output for s in streams] == [alone[i].output for i in (0, 1, 5)]


def test_a_row_that_waited_does_not_make_rows_of_plain_steps_wait(
    ahead: Runner, device: tuple[Runner, CudaSteps], ops: TroubledOps
) -> None:
    ops.likely = 0.0
    driver = Driver(ahead, depth=1)
    driver.add([5, 6, 7], Sampling(3, 0.0, constraint=LIST))
    for _ in range(4):
        driver.queued.append(driver.plan())
        driver.step()
    assert driver.num_waits > 0
    plain = Driver(ahead, depth=1)
    plain.add([5, 6, 7], Sampling(9, 0.0, ignore_eos=True))
    plain.run()
    assert plain.num_waits == 0
    assert bool((device[1].decodes.ready == 1).all())


def test_steps_of_few_rows_wait_longer_for_masks() -> None:
    assert [mask_polls(rows) for rows in (0, 1, 4, 64, 256)] == [200, 200, 80, 42, 40]
