"""Log-probabilities of prompts in steps ahead of the host: those of synchronous steps, and no step waits for them."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Driver, Stream
from reference_ops import run_ahead
from slot_plans import collected, prompt_of, started
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.execution import prompt_logprobs
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerEvents
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import FinishReason, KVSend, Sampling, SlotRun, StepPlan, TokenLogprobs

CAPACITY = 6


def greedy(**fields: Any) -> Sampling:
    return Sampling(**({"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | fields))


STREAMS: list[tuple[list[int], Sampling]] = [
    (prompt_of(23, 1), greedy(num_prompt_logprobs=3)),
    (prompt_of(9, 2), greedy(max_tokens=12)),
    (prompt_of(40, 3), greedy(num_prompt_logprobs=0, num_logprobs=2)),
    (prompt_of(2, 4), greedy(num_prompt_logprobs=20)),
    (prompt_of(1, 5), greedy(num_prompt_logprobs=5)),  # its only token has none
    (prompt_of(17, 6), greedy(num_prompt_logprobs=1, max_tokens=0)),
    (prompt_of(64, 7), greedy(num_prompt_logprobs=2)),  # the context ends it
    (prompt_of(12, 8), greedy(num_prompt_logprobs=4, bad_words=[[60, 61]], max_tokens=4)),  # sampled by the host
    (prompt_of(15, 9), Sampling(max_tokens=8, temperature=0.9, seed=5, repetition_penalty=1.2, num_prompt_logprobs=1)),
    (prompt_of(19, 10), greedy(num_prompt_logprobs=21)),  # more than the kernel finds
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    BY_NAME["llama"].save(folder)
    return folder


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Runner:
    runner = start(folder, max_model_len=64)
    run_ahead(runner, CAPACITY)
    return runner


@pytest.fixture(scope="module")
def waiting(folder: Path) -> Runner:
    runner = start(folder, max_model_len=64)
    run_ahead(runner, CAPACITY, waits=True)
    return runner


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Stream]:
    """The streams one by one, in synchronous steps."""
    plain, streams = start(folder, max_model_len=64), []
    for prompt, sampling in STREAMS:
        driver = Driver(plain)
        streams.append(driver.add(prompt, sampling))
        driver.run()
    return streams


def assert_equal(found: Stream, want: Stream) -> None:
    num = want.sampling.num_prompt_logprobs
    assert sorted(found.prompt_logprobs) == ([] if num is None else list(range(1, len(want.prompt))))
    for position, entry in found.prompt_logprobs.items():
        assert entry.token_id == want.prompt[position]
        assert_close(entry, want.prompt_logprobs[position])
    assert (found.output, found.finish, found.detail) == (want.output, want.finish, want.detail)


def assert_close(found: TokenLogprobs, want: TokenLogprobs) -> None:
    assert (found.token_id, found.rank, found.top_ids) == (want.token_id, want.rank, want.top_ids)
    values = [want.logprob, *want.top_logprobs]
    assert [found.logprob, *found.top_logprobs] == pytest.approx(values, abs=1e-4)


def check(runner: Runner, alone: list[Stream], picked: list[int], preempt: tuple[int, ...], **options: int) -> None:
    driver = Driver(runner, **options)
    streams = [driver.add(*STREAMS[i], preempt_at=preempt if i % 2 == 0 else ()) for i in picked]
    driver.run()
    for i, stream in zip(picked, streams, strict=True):
        assert_equal(stream, alone[i])
    assert len(driver.free_blocks) == runner.geometry.num_blocks


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    depth=st.sampled_from([0, 1, 3, 9]),
    chunk=st.sampled_from([1, 5, 16, 1000]),
    picked=st.lists(st.integers(0, len(STREAMS) - 1), min_size=1, max_size=6),
    preempt=st.lists(st.integers(0, 5), max_size=2),
)
def test_they_equal_those_of_synchronous_steps(
    ahead: Runner, alone: list[Stream], depth: int, chunk: int, picked: list[int], preempt: list[int]
) -> None:
    """Cut over chunks, several in a step, beside decodes, preempted between chunks and later."""
    check(ahead, alone, picked, tuple(preempt), depth=depth, chunk=chunk, num_slots=CAPACITY)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    depth=st.sampled_from([0, 3]),
    chunk=st.sampled_from([1, 5, 1000]),
    picked=st.lists(st.integers(0, len(STREAMS) - 1), min_size=1, max_size=6),
)
def test_they_are_reported_once_where_rows_wait(
    waiting: Runner, alone: list[Stream], depth: int, chunk: int, picked: list[int]
) -> None:
    check(waiting, alone, picked, (), depth=depth, chunk=chunk, num_slots=CAPACITY)


def test_logits_in_pieces_give_the_same(ahead: Runner, alone: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS_AT_ONCE", 16)
    check(ahead, alone, [0, 2, 6], (), depth=1, num_slots=CAPACITY)


@pytest.mark.parametrize("logits_edits", [True, False])
def test_a_step_with_several_such_prompts_runs_ahead(folder: Path, alone: list[Stream], logits_edits: bool) -> None:
    runner = start(folder, max_model_len=64)
    steps = run_ahead(runner, CAPACITY, logits_edits=logits_edits)
    runner.reset(4)
    runner.launch(StepPlan(1, 1, [], [started(0, *STREAMS[1], [3, 30])], [], [SlotRun(0, 9)]))
    more = [started(1, *STREAMS[0], [4, 5, 6]), started(2, *STREAMS[6], [*range(7, 15)])]
    more.append(started(3, *STREAMS[9], [31, 32, 33]))
    runner.launch(StepPlan(1, 2, [], more, [], [SlotRun(0, 1), SlotRun(1, 10), SlotRun(2, 64), SlotRun(3, 19)]))
    runner.launch(StepPlan(1, 3, [], [], [], [SlotRun(0, 1), SlotRun(1, 13)]))
    runner.launch(StepPlan(1, 4, [], [], [], [SlotRun(0, 1), SlotRun(1, 1)]))
    assert runner.in_flight == 4
    assert not steps.slots.num_prompt_logprobs, "no later step looks at these slots"
    results = collected(runner)
    assert [results[n][0].token_ids for n in (1, 2, 3, 4)] == [[token] for token in alone[1].output[:4]]
    assert [(results[n][1].first_prompt, len(results[n][1].prompt_logprobs)) for n in (2, 3)] == [(1, 10), (11, 12)]
    assert (results[2][2].first_prompt, results[2][2].finish) == (1, FinishReason.LENGTH)
    for n, slot, stream in ((2, 1, 0), (3, 1, 0), (2, 2, 6), (2, 3, 9)):
        for i, entry in enumerate(results[n][slot].prompt_logprobs):
            assert_close(entry, alone[stream].prompt_logprobs[results[n][slot].first_prompt + i])
    assert not results[4][1].prompt_logprobs and not any(results[n][0].prompt_logprobs for n in results)


def test_a_prompt_that_is_cancelled_between_chunks(ahead: Runner, alone: list[Stream]) -> None:
    """Its slot has a new owner while its chunk is in flight."""
    ahead.reset(4)
    starts = [started(0, *STREAMS[1], [3, 30]), started(1, *STREAMS[2], [*range(4, 9)])]
    ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 9), SlotRun(1, 20)]))
    ahead.launch(StepPlan(1, 2, [1], [started(1, *STREAMS[0], [9, 10, 11])], [], [SlotRun(0, 1), SlotRun(1, 23)]))
    ahead.launch(StepPlan(1, 3, [1], [], [], [SlotRun(0, 1)]))
    results = collected(ahead)
    assert [len(results[n][1].prompt_logprobs) for n in (1, 2)] == [20, 22]
    for n, stream in ((1, 2), (2, 0)):
        for i, entry in enumerate(results[n][1].prompt_logprobs):
            assert_close(entry, alone[stream].prompt_logprobs[i + 1])
    assert sorted(results[3]) == [0]
    loop = ahead.loop
    assert not loop.in_flight


def test_a_slot_that_fails_leaves_the_others_their_log_probabilities(ahead: Runner, alone: list[Stream]) -> None:
    ahead.reset(4)
    starts = [started(0, *STREAMS[0], [3, 4, 5]), started(1, *STREAMS[2], [*range(6, 11)])]
    ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 10), SlotRun(1, 20)]))
    collected(ahead)
    with torch.inference_mode():
        ahead.pool.runs[0][:, 3, :, :, 0] = float("nan")
    ahead.launch(StepPlan(1, 2, [], [], [], [SlotRun(0, 13), SlotRun(1, 20)]))
    results = collected(ahead)[2]
    assert results[0].finish is FinishReason.FAILED and results[1].finish is None
    for i, entry in enumerate(results[1].prompt_logprobs):
        assert_close(entry, alone[2].prompt_logprobs[21 + i])


def test_a_step_that_sends_blocks_of_such_a_prompt_tells_which_layers_are_stored(
    ahead: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DoneEvent:
        def record(self) -> None: ...

        def query(self) -> bool:
            return True

    make = partial(LayerEvents, make_event=DoneEvent)
    monkeypatch.setattr("blockyard.services.gpu_worker.execution.cuda.cuda_steps.LayerEvents", make)
    ahead.reset(4)
    plan = StepPlan(1, 1, [], [started(0, *STREAMS[0], [6, 7, 8])], [], [SlotRun(0, 23)])
    stored = ahead.launch(msgspec.structs.replace(plan, sends=[KVSend(1, 2, 1, b"", [6], [0], is_last=True)]))
    assert stored[-1].layers.stop == ahead.pool.shape.num_layers
    assert len(collected(ahead)[1][0].prompt_logprobs) == 22


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_on_a_gpu(folder: Path, alone: list[Stream], batch_invariant: bool) -> None:
    """As on the CPU; with batch invariance equal to the last bit, however a prompt is cut and what is beside it."""
    runner, first = start(folder, device="cuda", max_model_len=64, batch_invariant=batch_invariant), list[Stream]()
    for chunk, depth in ((1000, 0), (16, 3), (5, 1), (1, 3)):
        driver = Driver(runner, num_slots=len(STREAMS), depth=depth, chunk=chunk)
        streams = [driver.add(*stream) for stream in STREAMS]
        driver.run()
        first = first or streams
        for found, want, other in zip(streams, alone, first, strict=True):
            assert_equal(found, want)
            assert not batch_invariant or found.prompt_logprobs == other.prompt_logprobs
