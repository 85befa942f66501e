"""Sends from steps that are CUDA graphs: which layers count as stored, on a GPU."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import BY_NAME, start

from blockyard.kernels.slots.record_step import record_step
from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import Attend
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.messages import KVRole, KVSend, Sampling, SlotRun, SlotStart, StepPlan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CYCLES = 40_000_000  # 20 ms
CHUNK, BLOCKS = 32, [6, 7, 8, 9, 10, 11, 12, 13, 14]  # two chunks in blocks of 8 tokens, and the next token
TIMEOUT_S = 20.0


def test_a_replay_writes_a_word_once_the_kernels_before_it_are_complete() -> None:
    x, step = torch.zeros(1 << 20, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    words, graph, side = torch.zeros(2, dtype=torch.int32).pin_memory(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    got = torch.zeros(x.shape).pin_memory()
    record_step(step, words, 0)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step.add_(1)
        for index in range(2):
            torch.cuda._sleep(CYCLES)
            x.add_(1)
            record_step(step, words, index)
    numbers = words.numpy()
    for number in range(1, 5):
        graph.replay()
        for index in range(2):
            assert numbers[index] == number - 1, "the kernels before it have not run"
            deadline = time.monotonic() + TIMEOUT_S
            while numbers[index] != number:
                assert time.monotonic() < deadline
            with torch.cuda.stream(side):
                got.copy_(x, non_blocking=True)
            side.synchronize()
            assert bool((got == 2 * (number - 1) + index + 1).all()), "other bytes than before the word"
        torch.cuda.synchronize()


class Late:
    """Attention that the device begins 20 ms late. Implements `Attend`."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(self, *args: Any) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return self._attend(*args)

    def latent(self, *args: Any) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return self._attend.latent(*args)

    def of_rows(self, indices: Any) -> "Late":
        return Late(self._attend.of_rows(indices))


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A prefill worker whose steps replay one graph, with 20 ms before each layer stores its K and V."""
    BY_NAME["llama"].save(tmp_path)
    sends = KVTransferConfig(role=KVRole.PREFILL)
    made = start(
        tmp_path, device="cuda", max_model_len=256, max_num_batched_tokens=64, enforce_eager=True, kv_transfer=sends
    )
    steps = made.loop.steps
    assert isinstance(steps, CudaSteps)
    attend_of = DeviceOps.attend

    def slow(ops: DeviceOps, *args: Any) -> Attend:
        return Late(attend_of(ops, *args))

    monkeypatch.setattr(DeviceOps, "attend", slow)
    monkeypatch.setattr("blockyard.services.gpu_worker.execution.cuda.prefill_graphs.START_S", 0.0)
    steps.graphs.capture()
    assert steps.graphs.capture_error == ""
    graph = next(it for size, it in steps.graphs._graphs.items() if not size.num_decodes)
    assert steps.layer_words is not None and graph.descriptor.num_prefill_tokens >= CHUNK
    monkeypatch.setattr(steps.graphs, "find", lambda step: graph)
    return made


def plan(number: int, starts: list[SlotStart], sends: bool = True) -> StepPlan:
    send = [KVSend(1, 2, 1, b"", BLOCKS[4 * number - 4 : 4 * number], [0, 1, 2, 3], is_last=False)] if sends else []
    return StepPlan(1, number, [], starts, [], [SlotRun(0, CHUNK)], sends=send)


def begin(runner: Runner, seed: int) -> list[SlotStart]:
    """Empties the blocks. Returns a new prompt of two chunks."""
    runner.reset(2)
    with torch.inference_mode():
        runner.pool.runs[0][:, BLOCKS] = 0
    torch.cuda.synchronize()
    ids = np.random.default_rng(seed).integers(2, 200, 2 * CHUNK).astype("<u4")
    return [SlotStart(0, ids.tobytes(), 2 * CHUNK, 0, BLOCKS, Sampling(4, 0.0, ignore_eos=True), 0)]


def copies(runner: Runner, stored: Sequence[StoredLayers], blocks: list[int], side: torch.cuda.Stream) -> torch.Tensor:
    """Copies each group of layers on another stream as soon as it counts as stored."""
    parts, deadline = [], time.monotonic() + TIMEOUT_S
    for i, group in enumerate(stored):
        while not group.is_stored():
            assert time.monotonic() < deadline, f"layers {group.layers}"
        if i == 0:
            assert not stored[-1].is_stored(), "the first layers have waited for the last ones"
        with torch.cuda.stream(side), torch.inference_mode():
            parts.append(runner.pool.runs[0][group.layers.start : group.layers.stop, blocks].clone())
        side.synchronize()
    return torch.cat(parts)


def finish(runner: Runner) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while runner.in_flight:
        runner.collect()
        assert time.monotonic() < deadline


def test_layers_leave_while_a_captured_step_runs(runner: Runner) -> None:
    side = torch.cuda.Stream()
    for seed in range(3):
        stored = runner.launch(plan(1, begin(runner, seed)))
        assert [layer for group in stored for layer in group.layers] == list(range(runner.pool.shape.num_layers))
        assert not any(group.is_stored() for group in stored)
        got = copies(runner, stored, BLOCKS[:4], side)
        finish(runner)
        assert bool(got.flatten(2).any(2).all()), "a block was read before it was written"
        assert torch.equal(got, runner.pool.runs[0][:, BLOCKS[:4]])


def test_a_later_replay_of_the_same_graph_holds_no_send_back(runner: Runner) -> None:
    first = runner.launch(plan(1, begin(runner, 7)))
    second = runner.launch(plan(2, []))
    assert len(first) == len(second) and not any(group.is_stored() for group in (*first, *second))
    deadline = time.monotonic() + TIMEOUT_S
    while not runner.collect():
        assert time.monotonic() < deadline
    assert all(group.is_stored() for group in first) and not second[-1].is_stored()
    got = copies(runner, second, BLOCKS[4:8], torch.cuda.Stream())
    finish(runner)
    assert torch.equal(got, runner.pool.runs[0][:, BLOCKS[4:8]]) and bool(got.flatten(2).any(2).all())


def test_a_captured_step_without_sends_tells_nothing(runner: Runner) -> None:
    assert not runner.launch(plan(1, begin(runner, 9), sends=False))
    finish(runner)
