"""Steps with prefills in padded sizes give the same tokens, with any padding and any time of capture."""

from pathlib import Path

import numpy as np
import pytest
import torch
from plan_driver import Driver, Stream
from reference_ops import ReferenceOps, run_ahead
from ties import Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start
from torch import Tensor

from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps
from blockyard.services.gpu_worker.execution.cuda.prefill_graphs import (
    CapturedPrefill,
    CudaGraphRecorder,
    PrefillGraph,
    PrefillGraphs,
)
from blockyard.services.gpu_worker.execution.cuda.prefill_sizes import GraphCost
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import (
    BatchDescriptor,
    PrefillStep,
    SamplerInput,
    write_trial,
)
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import KVSend, Sampling, SlotRun, SlotStart, StepPlan, TokenLogprobs

CAPACITY = 6
LAUNCH_S = 0.1
STARTS = [SlotStart(0, np.arange(2, 14, dtype="<u4").tobytes(), 12, 0, [6, 7, 8], Sampling(4), 0)]
SEND = KVSend(1, 2, 1, b"", [6], [0], is_last=True)


class Forward:
    """Stands for a CUDA graph: computes a step again from the current content of its input buffer.

    Checks that the layers of the step, which is the last one that took buffers, count as stored then and not before.
    """

    def __init__(self, step: PrefillStep, steps: CudaSteps) -> None:
        self.count = 0
        self.size_to_capture: SamplerInput | None = None
        self.hidden: Tensor | None = None  # at one place, as the output of a graph
        self._step, self._ring, self._layer_words = step, steps.decodes.ring, steps.layer_words

    def replay(self) -> None:
        self.count += 1
        stored = [] if self._layer_words is None else self._layer_words.stored(self._ring.step)
        assert not any(group.is_stored() for group in stored)
        self.size_to_capture = due = self._step.forward()
        if due.hidden is not None:
            if self.hidden is None:
                self.hidden = due.hidden.clone()
            self.hidden.copy_(due.hidden)
        assert all(group.is_stored() for group in stored)


class Sample:
    def __init__(self, step: PrefillStep, forward: Forward, needs_processing: bool) -> None:
        self.count = 0
        self._step, self._forward, self._asked = step, forward, needs_processing

    def replay(self) -> None:
        self.count += 1
        assert self._forward.size_to_capture is not None
        self._step.sample(self._forward.size_to_capture, self._asked)


class GraphRecorder(CudaGraphRecorder):
    """Runs a step before its capture as on a GPU, with the same side effects."""

    def __init__(self, steps: CudaSteps, device_s: float) -> None:
        super().__init__(steps.decodes, steps.layer_words)
        self.forwards: dict[BatchDescriptor, Forward] = {}
        self.samples: dict[BatchDescriptor, tuple[Sample, ...]] = {}
        self._all_steps, self._device_s = steps, device_s

    def record(self, descriptor: BatchDescriptor) -> CapturedPrefill:
        words = torch.empty(sum(descriptor.parts), dtype=torch.int64)
        write_trial(words, descriptor, self._steps.pool.shape.vocab_size)
        step = PrefillStep(self._steps, descriptor, words, layers=self._layer_words)
        forward = Forward(step, self._all_steps)
        samples = tuple(Sample(step, forward, needs_processing) for needs_processing in (False, True))
        self._begin(descriptor)
        due = step.forward()
        forward.hidden = due.hidden
        for needs_processing in (False, True):
            step.sample(due, needs_processing)
        self.forwards[descriptor], self.samples[descriptor] = forward, samples
        return CapturedPrefill(
            PrefillGraph(descriptor, words, forward, samples, forward.hidden), GraphCost(LAUNCH_S, self._device_s, 0, 1)
        )


def with_graphs(
    runner: Runner, num: int, device_s: float = 0.0, records_layers: bool = True
) -> tuple[PrefillGraphs, GraphRecorder]:
    """Captures the first `num` sizes; others are captured by `runner.idle`."""
    steps = run_ahead(runner, CAPACITY, records_layers=records_layers)
    recorder = GraphRecorder(steps, device_s)
    steps.graphs = graphs = PrefillGraphs(steps.decodes, 48, recorder)
    graphs._enabled = True
    for _ in range(num):
        graphs.capture_one()
    return graphs, recorder


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("tiny")
    BY_NAME["llama"].save(folder)
    return start(folder, max_model_len=64)


def outputs(runner: Runner, chunk: int, asking: int | None, depth: int = 2) -> list[list[int]]:
    driver = Driver(runner, num_slots=CAPACITY, depth=depth, chunk=chunk)
    rng = np.random.default_rng(0)
    streams = []
    for i, n in enumerate((9, 12, 17, 14, 30, 11, 3, 2, 1, 26)):
        penalty = 1.9 if i == asking else 0.0
        sampling = Sampling(6 + i, 0.9 * (i % 2), seed=i, ignore_eos=True, presence_penalty=penalty)
        streams.append(driver.add(rng.integers(2, VOCAB, n).tolist(), sampling))
    driver.run()
    return [stream.output for stream in streams]


def test_scales_are_measured_by_prompts_of_requests_without_graphs(runner: Runner) -> None:
    """Not by trial steps: while they are pending, no prefill is a graph, and captures leave them pending."""
    run_ahead(runner, CAPACITY)
    expected = outputs(runner, 5, None)
    graphs, recorder = with_graphs(runner, 3)
    runner.pool.scales_pending = True
    try:
        seen = []
        record = recorder.record
        recorder.record = lambda size: (seen.append(runner.pool.scales_pending), record(size))[1]
        while graphs.capture_one():
            pass
        assert seen and not any(seen) and runner.pool.scales_pending
        assert outputs(runner, 5, None) == expected
        assert not any(forward.count for forward in recorder.forwards.values())
    finally:
        runner.pool.scales_pending = False


@pytest.mark.parametrize(("chunk", "num_used", "asking"), [(5, 5, None), (8, 2, None), (5, 5, 4)])
def test_padding_does_not_change_tokens(runner: Runner, chunk: int, num_used: int, asking: int | None) -> None:
    """`asking` is the index of a stream with logits edits."""
    run_ahead(runner, CAPACITY)
    expected = outputs(runner, chunk, asking)
    _, recorder = with_graphs(runner, 100)
    assert outputs(runner, chunk, asking) == expected
    assert sum(forward.count for forward in recorder.forwards.values()) >= num_used
    needs_processing = sum(samples[True].count for samples in recorder.samples.values())
    assert (needs_processing > 0) == (asking is not None)
    assert sum(forward.count for one, forward in recorder.forwards.items() if one.num_decodes) > 0


@pytest.mark.parametrize("last", [2**31 - 3, 2**32 - 3])
def test_numbers_of_steps_wrap_around(runner: Runner, last: int) -> None:
    """Sizes are captured before and after it."""
    run_ahead(runner, CAPACITY)
    expected = outputs(runner, 5, 4, 3)
    graphs, _ = with_graphs(runner, 2)
    ring = graphs._steps.ring
    ring.step = last
    graphs.capture_one()  # its trial has this number
    assert outputs(runner, 5, 4, 3) == expected
    while graphs.capture_one():
        pass
    assert outputs(runner, 5, 4, 3) == expected
    assert ring.step > last + 12 and graphs.captured == 1.0 and graphs.capture_error == ""


def test_no_size_is_captured_beside_steps(runner: Runner) -> None:
    """What steps missed is captured in idle time, once two sizes are measured."""
    graphs, recorder = with_graphs(runner, 1)
    before = list(recorder.forwards)
    outputs(runner, 5, None)
    assert list(recorder.forwards) == before and graphs._sizes._lost_s
    missed = max(graphs._sizes._lost_s, key=graphs._sizes._lost_s.__getitem__)
    assert runner.idle() and runner.idle()
    assert list(recorder.forwards)[2] == missed


@pytest.mark.parametrize("chunk", [5, 8])
def test_steps_that_score_prompts_have_graphs_of_their_own(runner: Runner, chunk: int) -> None:
    """They are captured in idle times if steps have missed them."""

    def scored() -> list[dict[int, TokenLogprobs]]:
        driver = Driver(runner, num_slots=CAPACITY, depth=2, chunk=chunk)
        rng = np.random.default_rng(1)
        for i, n in enumerate((9, 26, 12, 17, 3, 2, 30)):
            num = None if i % 3 == 0 else i
            sampling = Sampling(6 + i, 0.0, ignore_eos=True, num_prompt_logprobs=num)
            driver.add(rng.integers(2, VOCAB, n).tolist(), sampling)
        driver.run()
        return [stream.prompt_logprobs for stream in driver.streams]

    run_ahead(runner, CAPACITY)
    expected = scored()
    graphs, recorder = with_graphs(runner, 100)
    assert graphs.captured == 1.0 and not any(one.keeps_hidden for one in recorder.forwards)
    assert any(expected) and scored() == expected
    assert graphs.captured < 1.0
    while graphs.capture_one():
        pass
    assert scored() == expected
    kept = {one: forward.count for one, forward in recorder.forwards.items() if one.keeps_hidden}
    assert graphs.captured == 1.0 and sum(kept.values()) > len(kept)
    assert {one.num_decodes > 0 for one in kept} == {True, False}


def test_without_graphs_nothing_is_captured_beside_steps(runner: Runner) -> None:
    graphs, recorder = with_graphs(runner, 0)
    outputs(runner, 5, None)
    assert (recorder.forwards, graphs.captured) == ({}, 0.0)


def test_a_step_without_decodes_may_take_a_size_with_rows_for_decodes(runner: Runner) -> None:
    """Sizes with rows for decodes count the step on the device, the others do not."""
    run_ahead(runner, CAPACITY)
    expected = outputs(runner, 5, None)
    graphs, recorder = with_graphs(runner, 2)
    only = next(descriptor for descriptor in recorder.forwards if descriptor.num_decodes)
    graphs._sizes._device_s = {only: 0.0}
    graphs._sizes.missing.clear()
    assert outputs(runner, 5, None) == expected
    assert recorder.forwards[only].count >= 5


def test_a_graph_of_a_step_that_sends_tells_which_layers_are_stored(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recorder = with_graphs(runner, 100)
    steps, num_layers = runner.loop.steps, runner.pool.shape.num_layers
    assert isinstance(steps, CudaSteps) and steps.layer_words is not None
    runner.reset(2)
    with torch.inference_mode():
        runner.pool.runs[0][:, 6] = 0
    told: list[tuple[list[bool], list[bool]]] = []  # by word that is written: layers with KV, layers that are told
    record_step = ReferenceOps.record_step

    def seen(ops: ReferenceOps, step: Tensor, words: Tensor, index: int) -> None:
        record_step(ops, step, words, index)
        stored = steps.layer_words.stored(steps.decodes.ring.step)  # type: ignore[union-attr]
        has_kv = runner.pool.runs[0][:, 6].flatten(1).any(1).tolist()
        told.append((has_kv, [group.is_stored() for group in stored for _ in group.layers]))

    monkeypatch.setattr(ReferenceOps, "record_step", seen)
    first = runner.launch(StepPlan(1, 1, [], STARTS, [], [SlotRun(0, 3)], sends=[SEND]))
    assert told == [([i <= end for i in range(num_layers)],) * 2 for end in range(num_layers)]
    second = runner.launch(StepPlan(1, 2, [], [], [], [SlotRun(0, 4)], sends=[SEND]))
    for stored in (first, second):
        assert [layer for group in stored for layer in group.layers] == list(range(num_layers))
        assert all(group.is_stored() for group in stored)
    assert not any(group.is_stored() for group in steps.layer_words.stored(steps.decodes.ring.step + 1))
    assert not runner.launch(StepPlan(1, 3, [], [], [], [SlotRun(0, 2)])), "nothing to send"
    assert sum(forward.count for forward in recorder.forwards.values()) == 3
    while runner.in_flight:
        runner.collect()


def test_graphs_of_a_worker_that_sends_no_prefills_write_no_words(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceOps, "record_step", None)
    _, recorder = with_graphs(runner, 100, records_layers=False)
    runner.reset(2)
    assert not runner.launch(StepPlan(1, 1, [], STARTS, [], [SlotRun(0, 3)], sends=[SEND])), "sent once it is complete"
    assert sum(forward.count for forward in recorder.forwards.values()) == 1
    while runner.in_flight:
        runner.collect()


def test_a_size_that_cannot_be_captured_runs_eagerly(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    run_ahead(runner, CAPACITY)
    expected = outputs(runner, 5, None)
    graphs, recorder = with_graphs(runner, 1)

    def fail(descriptor: BatchDescriptor) -> CapturedPrefill:
        raise RuntimeError("CUDA out of memory\nand more")

    recorder.record = fail  # type: ignore[method-assign]
    assert not graphs.capture_one()
    assert outputs(runner, 5, None) == expected
    assert graphs.describe() == "CUDA graphs of prefills: none: CUDA out of memory"
    assert (graphs.captured, len(caplog.records)) == (1.0, 1)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First few sizes are captured, then all; greedy outputs are equal up to ties."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    score = greedy_score(BY_NAME[name].save(tmp_path).to("cuda"))
    runner = start(tmp_path, device="cuda", max_model_len=256, max_num_batched_tokens=256, enforce_eager=True)
    expected = many(runner)
    steps = runner.loop.steps
    assert isinstance(steps, CudaSteps)
    monkeypatch.setattr("blockyard.services.gpu_worker.execution.cuda.prefill_graphs.START_S", 0.0)
    steps.capture()
    ties = Ties()
    for _ in range(2):
        for i, (want, got) in enumerate(zip(expected, many(runner), strict=True)):
            ties.compare(f"stream {i}", want.prompt, want.output, got.output, score)
        while steps.idle():
            pass
    ties.check()
    assert (steps.graphs.capture_error, steps.captured) == ("", 1.0)
    assert len(steps.graphs._graphs) > 10


def many(runner: Runner) -> list[Stream]:
    driver = Driver(runner, num_slots=20, depth=3, chunk=12)
    rng = np.random.default_rng(1)
    for i in range(40):
        prompt = rng.integers(2, VOCAB, int(rng.integers(1, 80))).tolist()
        driver.add(prompt, Sampling(5 + i % 30, 0.0, ignore_eos=True, presence_penalty=0.5 * (i % 7 == 6)))
    driver.run()
    return driver.streams
