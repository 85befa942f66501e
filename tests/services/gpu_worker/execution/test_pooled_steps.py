"""Decoders that pool, by plans: in chunks, preempted, beside others, after a prefix hit, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoint import LLAMA, VOCAB, Tiny
from tiny_models import settings
from tiny_poolers import BY_NAME, hidden_and_outputs
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.pooling.modes import PoolingMode
from blockyard.shared.messages import FinishReason, Sampling, SlotBlocks, SlotResult, SlotRun, SlotStart, StepPlan

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(2, VOCAB, n).tolist() for n in (1, 30, 17, 50)]
BLOCKS = 8  # of each slot


def start(folder: Path, device: str, **others: Any) -> Runner:
    options = {"max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 80, "task": "embed"} | others
    runner = engine.start(settings(folder, device=device, dtype="float32", **options), lambda *_: None)
    assert isinstance(runner, Runner)
    return runner


def enter(slot: int, num_computed: int = 0) -> SlotStart:
    ids = np.array(TEXTS[slot], "<u4").tobytes()
    blocks = list(range(slot * BLOCKS, (slot + 1) * BLOCKS))
    return SlotStart(slot, ids, len(TEXTS[slot]), num_computed, blocks, Sampling(1), 0, has_text=False)


def run(runner: Runner, plans: list[tuple[list[SlotStart], list[tuple[int, int]]]]) -> dict[int, Tensor]:
    """plans: of each what enters slots, and the slots that run with their tokens. Returns the numbers by slot."""
    runner.reset(len(TEXTS))
    results: list[SlotResult] = []
    for number, (starts, runs) in enumerate(plans, 1):
        blocks: list[SlotBlocks] = []
        results += runner.execute(StepPlan(0, number, [], starts, blocks, [SlotRun(*one) for one in runs]))
    done = [result for result in results if result.finish is not None]
    assert all(result.finish is FinishReason.STOP for result in done), [result.detail for result in done]
    assert len({result.slot for result in done}) == len(done), "each is answered once"
    return {result.slot: torch.from_numpy(np.frombuffer(result.vector, "<f4").copy()) for result in done}


ALL = [(slot, 64) for slot in range(len(TEXTS))]
WHOLE = [([enter(slot) for slot in range(len(TEXTS))], ALL)]
CHUNKS = [([enter(slot) for slot in range(len(TEXTS))], [(slot, n) for slot in range(len(TEXTS))]) for n in (7,)] + [
    ([], [(1, 8), (3, 20), (2, 1)]),
    ([], [(1, 64), (2, 64)]),
    ([], ALL),
]
PREEMPTED = [
    ([enter(1), enter(3)], [(1, 10), (3, 30)]),
    ([enter(3), enter(2)], [(3, 9), (2, 4)]),
    ([enter(1), enter(0)], ALL),
    ([], ALL),
]


def expected_of(theirs: Any, mode: PoolingMode, text: list[int]) -> Tensor:
    hidden, _ = hidden_and_outputs(theirs, text)
    found = {PoolingMode.CLS: hidden[0], PoolingMode.LAST: hidden[-1], PoolingMode.MEAN: hidden.mean(0)}
    return hidden.flatten() if mode is PoolingMode.ALL else found[mode] / found[mode].norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [PoolingMode.CLS, PoolingMode.LAST, PoolingMode.MEAN, PoolingMode.ALL], ids=str)
def test_each_pooling_in_chunks_and_preempted(mode: PoolingMode, device: str, tmp_path: Path) -> None:
    theirs = BY_NAME["qwen3-model"].save(tmp_path)
    normalize = "false" if mode is PoolingMode.ALL else "true"
    config = f'{{"pooling_type": "{mode.name}", "normalize": {normalize}}}'
    runner = start(tmp_path, device, pooler_config=config)
    for plans in (WHOLE, CHUNKS, PREEMPTED, WHOLE):
        got = run(runner, plans)
        assert got.keys() == set(range(len(TEXTS)))
        for slot, numbers in got.items():
            torch.testing.assert_close(numbers, expected_of(theirs, mode, TEXTS[slot]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_last_after_a_prefix_hit(device: str, tmp_path: Path) -> None:
    """A causal model with its head, by --task embed: the default is the last token."""
    tiny = Tiny("qwen3", Qwen3Config, Qwen3ForCausalLM, LLAMA | {"head_dim": 16})
    theirs = tiny.save(tmp_path)
    runner = start(tmp_path, device)
    assert runner.geometry.vector_size == 64
    plans = [([enter(3)], [(3, 40)]), ([enter(3, num_computed=40)], [(3, 64)])]
    got = run(runner, plans)[3]
    torch.testing.assert_close(got, expected_of(theirs, PoolingMode.LAST, TEXTS[3]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama-classes", "mistral-score", "gemma-classes", "qwen2-tokens"])
def test_classifiers(name: str, device: str, tmp_path: Path) -> None:
    theirs = BY_NAME[name].save(tmp_path)
    runner = start(tmp_path, device, task="classify")
    for slot, numbers in run(runner, CHUNKS).items():
        logits = hidden_and_outputs(theirs, TEXTS[slot])[1].reshape(-1, runner.geometry.vector_size)
        expected = logits.sigmoid() if name == "mistral-score" else logits.softmax(-1)
        torch.testing.assert_close(numbers, expected.flatten(), atol=1e-4, rtol=1e-4)
