"""Models with latent attention through the steps of a GPU: kernels, graphs of prefills, run-ahead."""

from pathlib import Path

import numpy as np
import pytest
import torch
from plan_driver import Driver
from reference_ops import run_ahead
from ties import Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start

from blockyard.kernels.attention.latent import prefill_in_pieces
from blockyard.services.gpu_worker.execution.cuda import cuda_steps, prefill_graphs
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import DecodeSettings, DecodeSteps
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.execution.cuda.prefill_graphs import PrefillGraph, PrefillGraphs
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import BatchDescriptor
from blockyard.services.gpu_worker.layers.fused_ops import OPS
from blockyard.services.gpu_worker.layers.triton_ops import TritonOps
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENT = ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "deepseek-v3-halves", "glm4-moe-lite"]


def outputs(
    runner: Runner, lengths: tuple[int, ...], num_out: int, **options: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts and greedy tokens of streams, of which the second is preempted."""
    driver = Driver(runner, seed=4, **options)
    prompts = [np.random.default_rng(n).integers(2, VOCAB, n).tolist() for n in lengths]
    sampling = Sampling(max_tokens=num_out, temperature=0.0, ignore_eos=True)
    streams = [driver.add(prompt, sampling, preempt_at=(2,) if i == 1 else ()) for i, prompt in enumerate(prompts)]
    driver.run()
    return [(stream.prompt, stream.output) for stream in streams]


def test_the_kernels_give_the_tokens_of_the_plain_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, whose later ones decompress cached rows in pieces, beside decodes."""
    monkeypatch.setattr(prefill_in_pieces, "_PIECE_BYTES", 1)
    BY_NAME["deepseek-v3"].save(tmp_path)
    want = outputs(start(tmp_path, device="cpu"), (5, 3, 80), 3, num_slots=3, chunk=70)
    monkeypatch.setitem(OPS, DEVICE, TritonOps)
    fast = start(tmp_path, device=DEVICE)
    shape = fast.geometry
    settings = DecodeSettings(capacity=3, max_model_len=shape.max_model_len, eos_token_ids=shape.eos_token_ids)
    steps = DecodeSteps(fast.model, fast.pool, settings, DeviceOps())
    fast.use(cuda_steps.CudaSteps(steps, fast.batch, 70))
    assert outputs(fast, (5, 3, 80), 3, num_slots=3, depth=1, chunk=70) == want


def test_steps_with_cached_context_take_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number of pieces differs; prompts of one step may take one."""
    asked: list[BatchDescriptor] = []

    def find(self: PrefillGraphs, step: BatchDescriptor) -> PrefillGraph | None:
        asked.append(step)
        return None

    monkeypatch.setattr(prefill_graphs.PrefillGraphs, "find", find)
    BY_NAME["deepseek-v2"].save(tmp_path)
    runner = start(tmp_path, max_model_len=64)
    want = outputs(runner, (9, 20), 4)
    run_ahead(runner, 6)
    for chunk, num_asked in ((100, 2), (12, 2)):  # the second stream begins again after its preemption
        asked.clear()
        assert outputs(runner, (9, 20), 4, depth=1, chunk=chunk) == want
        assert len(asked) == num_asked


@pytest.mark.cuda
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("name", LATENT)
def test_tokens_on_a_gpu_are_those_of_the_cpu(name: str, depth: int, tmp_path: Path) -> None:
    """In graphs and without, whole prompts and chunks beside decodes, up to ties."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    compare_with_the_cpu(name, depth, tmp_path, (1, 9, 33, 64, 100, 17, 45))


def compare_with_the_cpu(name: str, depth: int, tmp_path: Path, *batches: tuple[int, ...]) -> None:
    """batches: lengths of the prompts that run at a time."""
    score = greedy_score(BY_NAME[name].save(tmp_path))
    ties, host = Ties(), start(tmp_path)
    want = [one for lengths in batches for one in outputs(host, lengths, 40)]
    for eager in (False, True):
        runner = start(tmp_path, device="cuda", enforce_eager=eager)
        steps = runner.loop.steps
        assert isinstance(steps, cuda_steps.CudaSteps)
        while not eager and steps.idle():
            pass
        assert eager or (steps.graphs.capture_error, steps.decodes.capture_error) == ("", "")
        for chunk in (10**6, 24):
            got = [one for lengths in batches for one in outputs(runner, lengths, 40, depth=depth, chunk=chunk)]
            for i, ((prompt, expected), (_, tokens)) in enumerate(zip(want, got, strict=True)):
                ties.compare(f"{name} {i}, chunks of {chunk}", prompt, expected, tokens, score)
    ties.check()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_rows_in_8_bits_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """Most tokens are those that the model chooses behind the same tokens with its cache in 32 bits."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    theirs = BY_NAME["deepseek-v2-lite"].save(tmp_path)
    runner = start(tmp_path, device="cuda", dtype="bfloat16", kv_cache_dtype=kind, calculate_kv_scales=True)
    same: list[bool] = []
    for prompt, tokens in outputs(runner, (9, 20, 33, 40, 50, 64), 8):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0]
        same += (logits.argmax(-1)[len(prompt) - 1 : -1] == torch.tensor(tokens)).tolist()
    assert sum(same) > len(same) // 2
