"""Decode steps with the Triton kernels and the device's block tables, compared with the plain path."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import fake_grammar_engine
import numpy as np
import pytest
import torch
from fake_grammar_engine import constraint
from plan_driver import Driver
from tiny_models import BY_NAME, VOCAB, settings, start

from blockyard.kernels.layers.linear_skinny import linear_skinny
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.services.gpu_worker import engine, memory_profile
from blockyard.services.gpu_worker.attention import choice
from blockyard.services.gpu_worker.attention.choice import FUSED_DECODE_MAX_LEN
from blockyard.services.gpu_worker.execution.cuda import device_ops
from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import (
    DecodeSettings,
    DecodeSize,
    DecodeSteps,
    ForwardOutput,
    capture_order,
    num_mask_slots,
)
from blockyard.services.gpu_worker.execution.cuda.device_masks import SlotMasks, share_masks
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.layers.fused_ops import OPS
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.triton_ops import TritonOps
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.structured_output import matcher_client
from blockyard.shared.config.services.worker import capture_sizes
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import Sampling

SRC = Path(__file__).parents[4] / ".src"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def outputs(runner: Runner) -> list[list[int]]:
    """Streams that begin and end at different steps, one plan ahead, one preempted, more streams than slots."""
    driver = Driver(runner, num_slots=3, depth=1, seed=2)
    streams = []
    needs_processing = (
        {},
        {"repetition_penalty": 1.3, "logit_bias": [(8, 2.0)], "bad_words": [[9]], "num_logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "frequency_penalty": 0.5, "min_tokens": 2},
        {"temperature": 0.7, "seed": 5, "presence_penalty": 0.4, "bad_words": [[9, 10]]},  # the host samples it
    )
    for i, (num_in, num_out) in enumerate(((5, 3), (1, 5), (9, 2), (7, 4), (4, 3))):
        prompt = np.random.default_rng(i).integers(2, VOCAB, num_in).tolist()
        sampling = Sampling(**({"max_tokens": num_out, "temperature": 0.0, "ignore_eos": True} | needs_processing[i]))
        streams.append(driver.add(prompt, sampling, preempt_at=(2,) if i == 1 else ()))
    driver.run()
    assert [len(s.output) for s in streams] == [3, 5, 2, 4, 3]
    scores = [[entry.rank, *entry.top_ids] for s in streams for entry in s.logprobs]
    assert len(scores) == 5
    return [*(s.output for s in streams), *scores]


def alone(runner: Runner) -> list[int]:
    """One stream: eight output tokens after a prompt of five."""
    driver = Driver(runner, num_slots=1, depth=1, seed=2)
    stream = driver.add([3, 5, 7, 9, 11], Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    driver.run()
    return stream.output


def steps_of(runner: Runner, capacity: int, ops: DeviceOps | None = None, masks: SlotMasks | None = None) -> CudaSteps:
    shape = runner.geometry
    settings = DecodeSettings(
        capacity=capacity,
        max_model_len=shape.max_model_len,
        eos_token_ids=shape.eos_token_ids,
        logits_edits=True,
        masks=masks,
    )
    return CudaSteps(DecodeSteps(runner.model, runner.pool, settings, ops), runner.batch, 64)


def take_in(linear: Linear) -> None:
    """Steps of up to three rows compute this layer and its neighbouring operations in one kernel."""
    weight, bias, tiles = linear.method.weight, linear.method.bias, {"out_tile": 64, "tile": 64, "warps": 4, "early": 2}
    fused = partial(linear_skinny, weight=weight, bias=bias, pdl=supports_pdl(weight.device), **tiles)
    linear.use({}, fused=dict.fromkeys((1, 2, 3), fused))


NAMES = ["llama-odd", "mistral-window", "qwen3", "opt"]


@pytest.mark.parametrize("name", NAMES if DEVICE == "cuda" else NAMES[:1])  # the interpreter is slow
def test_same_tokens_as_the_plain_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BY_NAME[name].save(tmp_path)
    want = outputs(start(tmp_path, device="cpu"))
    monkeypatch.setitem(OPS, DEVICE, TritonOps)
    monkeypatch.setattr(Linear, "prepare", lambda linear: None)  # weights are not repacked
    fast = start(tmp_path, device=DEVICE)
    for linear in fast.model.linears():
        take_in(linear)
    steps = steps_of(fast, 3, DeviceOps(FUSED_DECODE_MAX_LEN))
    fast.use(steps)
    ran = []
    launch = steps.launch
    monkeypatch.setattr(steps, "launch", lambda step: ran.append(len(step.rows)) or launch(step))
    assert outputs(fast) == want
    assert max(ran) == 3
    if DEVICE == "cuda":
        assert outputs(fast) == want, "the tables of the last owners must not be taken for these"


def test_masks_of_matcher_processes_reach_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded, with penalties, in a prefill's last row: the tokens are those of rows that the host masks."""
    monkeypatch.setattr(matcher_client, "COMMAND", fake_grammar_engine.COMMAND)
    BY_NAME["llama"].save(tmp_path)
    cpu, runner = start(tmp_path, device="cpu"), start(tmp_path, device=DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setitem(OPS, DEVICE, TritonOps)
        monkeypatch.setattr(Linear, "prepare", lambda linear: None)  # weights are not repacked
        runner = start(tmp_path)
        vocab_size = runner.geometry.vocab_size
        masks = share_masks(runner.batch.matchers, num_mask_slots(3), vocab_size, runner.model.table.link)
        runner.use(steps_of(runner, 3, masks=masks))
    asked: list[dict[str, object]] = [
        {"constraint": constraint(modulus=3, length=6)},
        {"constraint": constraint(modulus=2, length=4), "temperature": 1.0, "seed": 3, "repetition_penalty": 1.4},
        {},
    ]
    found = []
    for one, depth in ((cpu, 0), (runner, 2)):
        driver = Driver(one, num_slots=3, depth=depth, seed=depth)
        for i, fields in enumerate(asked):
            prompt = np.random.default_rng(i).integers(2, VOCAB, 5 + i).tolist()
            driver.add(prompt, Sampling(**({"max_tokens": 6, "temperature": 0.0, "ignore_eos": i == 2} | fields)))
        driver.run()
        found.append([(s.output, s.finish, s.detail) for s in driver.streams])
    assert found[0] == found[1]
    assert runner.batch.matchers is not None
    assert runner.batch.matchers.num_masks == 6 + 5
    for one in (cpu, runner):
        assert one.batch.matchers is not None
        one.batch.matchers.close()


def test_fused_decode_is_not_used_for_a_sequence_that_is_too_long(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    steps = steps_of(start(tmp_path, device=DEVICE), 2, DeviceOps(8)).decodes
    assert steps.padded(1, 8) == DecodeSize(1, short_context=True)
    assert steps.padded(1, 9) == DecodeSize(1, short_context=False)
    assert steps.padded(2, 1) == DecodeSize(2, short_context=False)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_stream_that_outgrows_fused_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BY_NAME["qwen3"].save(tmp_path)
    want = alone(start(tmp_path, device="cpu"))
    for module in (choice, device_ops):
        monkeypatch.setattr(module, "FUSED_DECODE_MAX_LEN", 8)
    runner = start(tmp_path, device="cuda")
    replayed: list[tuple[bool, bool]] = []
    decodes = runner.loop.steps.decodes
    forward = decodes.forward

    def recorded(size: DecodeSize, *, is_eager: bool = False) -> ForwardOutput:
        replayed.append((size.short_context, size in decodes._graphs))
        return forward(size, is_eager=is_eager)

    monkeypatch.setattr(decodes, "forward", recorded)
    assert alone(runner) == want
    assert replayed[:7] == [(True, True)] * 3 + [(False, True)] * 4
    assert set(replayed[7:]) <= {(False, True)}, "a plan may be in flight when the stream ends"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_host_samples_slots_beside_steps_in_flight(tmp_path: Path) -> None:
    BY_NAME["qwen3"].save(tmp_path)
    cpu, gpu = start(tmp_path, device="cpu"), start(tmp_path, device="cuda")
    asked: list[dict[str, object]] = [
        {"bad_words": [[9, 10], [4, 5, 6]]},
        {},
        {"bad_words": [[9, 10]], "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"stop_token_ids": list(range(1000, 1010)), "num_logprobs": 2},
        {"num_prompt_logprobs": 1, "bad_words": [[3, 4]]},
    ]
    found = []
    for runner, depth in ((cpu, 0), (gpu, 0), (gpu, 1), (gpu, 5)):
        driver = Driver(runner, num_slots=8, depth=depth, seed=depth)
        for i, fields in enumerate(asked):
            prompt = np.random.default_rng(i).integers(2, VOCAB, 5 + i).tolist()
            driver.add(prompt, Sampling(**({"max_tokens": 16, "temperature": 0.0, "ignore_eos": True} | fields)))
        driver.run()
        found.append([(s.output, sorted(s.prompt_logprobs), len(s.logprobs)) for s in driver.streams])
        assert driver.num_waits > 0
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("head_dim", [15, 514])
def test_a_head_size_is_refused_by_name(head_dim: int, tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    runner = start(tmp_path, device=DEVICE)
    shape = runner.pool.shape
    attention = tuple(replace(layer, head_dim=head_dim) for layer in shape.attention)
    runner.model.shape = runner.pool.shape = replace(shape, attention=attention)
    with pytest.raises(LoadError, match=f"a head size of {head_dim} is not supported"):
        steps_of(runner, 2)
    with pytest.raises(LoadError, match=f"a head size of {head_dim} is not supported"):
        memory_profile._prefill(runner.model, runner.pool, 4, 64, 4)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (16, [1, 2, 4, 8, 16]),
        (70, [1, 2, 4, 8, 16, 32, 48, 64, 70]),
        (256, [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]),
    ],
)
def test_capture_sizes(most: int, sizes: list[int]) -> None:
    assert capture_sizes(most) == sizes
    assert capture_sizes(most + 1000)[-1] == most + 1000
    assert sorted(capture_order(sizes)) == sizes


def test_the_first_captured_sizes_keep_padding_small() -> None:
    assert capture_order(capture_sizes(256)) == [256, 64, 8, 128, 2, 32, 96, 192, 1, 4, 16, 48, 80, 112, 160, 224]


def test_triton_is_not_loaded_on_cpu(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    code = f"""
import sys
from blockyard.services.gpu_worker import engine
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
process = ProcessConfig(name="worker", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
engine.start(WorkerConfig(process=process, model_path={str(tmp_path)!r}, device="cpu", threads=1), lambda *_: None)
ours = ("triton_attention", "device_ops", "cuda_steps")
print([m for m in sys.modules if m.startswith("triton") or any(name in m for name in ours)])
"""
    env = os.environ | {"PYTHONPATH": f"{SRC}:{os.environ.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_that_cannot_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    BY_NAME["llama"].save(tmp_path)
    want = outputs(start(tmp_path, device="cuda"))

    def fails(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    notes: list[str] = []
    runner = engine.start(settings(tmp_path, device="cuda"), lambda phase, done, lines: notes.extend(lines))
    assert "CUDA graphs: none, decode steps are eager: CUDA out of memory" in notes
    assert len(caplog.records) == 1
    assert outputs(runner) == want
