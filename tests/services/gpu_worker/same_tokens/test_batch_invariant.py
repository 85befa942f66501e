"""--batch-invariant: a stream's log-probabilities are bitwise equal alone, batched, in chunks and preempted."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kept_forms import FORMS
from plan_driver import Driver, Stream
from tiny_models import BY_NAME, VOCAB, settings

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stream(driver: Driver, length: int, preempt_at: tuple[int, ...] = ()) -> Stream:
    prompt = np.random.default_rng(length).integers(2, VOCAB, length).tolist()
    return driver.add(prompt, Sampling(max_tokens=6, ignore_eos=True, seed=7, num_logprobs=2), preempt_at=preempt_at)


def run(runner: Runner, others: tuple[int, ...], chunk: int = 10**6, preempt_at: tuple[int, ...] = ()) -> bytes:
    driver = Driver(runner, num_slots=4, seed=len(others), chunk=chunk)
    it = stream(driver, 23, preempt_at)
    for other in others:
        stream(driver, other)
    driver.run()
    assert len(it.output) == 6
    return msgspec.msgpack.encode((it.output, it.logprobs))


@pytest.mark.parametrize(
    "name",
    [
        "llama-odd",
        "mistral-window",
        "qwen3",
        "qwen2-moe",
        "gemma2",
        "gemma3",
        "gemma4-sees",
        "olmo2",
        "cohere-plus",
        "gpt2",
        "gpt-neox",
        "deepseek-v3",
        "glm4-moe",
        "gpt-oss",
    ],
)
def test_a_stream_has_the_same_logprobs_in_any_batch(name: str, tmp_path: Path) -> None:
    BY_NAME[name].save(tmp_path)
    check_any_batch(tmp_path)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_quantized_weights(name: str, model: str, tmp_path: Path) -> None:
    """In float32 the CPU multiplies numbers, in bfloat16 some codes."""
    made = FORMS[name].write(tmp_path, model)
    for dtype in ("float32", "bfloat16"):
        check_any_batch(made.packed, dtype=dtype)


def check_any_batch(folder: Path, **fields: Any) -> None:
    config = msgspec.structs.replace(settings(folder, device=DEVICE, **fields), batch_invariant=True)
    runner = engine.start(config, lambda *_: None)
    alone = run(runner, ())
    assert run(runner, (5, 31, 1)) == alone
    assert run(runner, (12,), chunk=4) == alone
    assert run(runner, (9, 2), chunk=7, preempt_at=(2,)) == alone
