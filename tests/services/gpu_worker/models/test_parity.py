"""Every family and RoPE kind against transformers, in float32."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from model_logits import all_logits
from plan_driver import Driver
from ties import Ties
from tiny_models import BY_NAME, MODELS, VOCAB, Tiny, greedy_score, start
from transformers import PreTrainedModel

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

PROMPT_LENGTHS = (1, 8, 9, 30, 45, 64)  # of blocks of 8
OUTPUT = 20


@dataclass
class Pair:
    tiny: Tiny
    theirs: PreTrainedModel
    ours: Runner
    folder: Path


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, VOCAB, n).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


@pytest.fixture(scope="module", params=MODELS, ids=lambda tiny: tiny.name)
def pair(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    tiny: Tiny = request.param
    folder = tmp_path_factory.mktemp(tiny.name)
    theirs = tiny.save(folder).to(device)
    yield Pair(tiny, theirs, start(folder, device=device), folder)


def test_logits(pair: Pair) -> None:
    ids = np.random.default_rng(4).integers(2, VOCAB, 120).tolist()
    with torch.no_grad():
        expected = pair.theirs(torch.tensor([ids], device=pair.theirs.device)).logits[0]
    assert float(expected.std()) > 0.3, "a checkpoint with flat logits would show nothing"
    for chunks in ([120], [1] * 20 + [100], [50, 1, 20, 8, 1, 40]):
        difference = float((all_logits(pair.ours, ids, chunks) - expected).abs().max())
        assert difference <= 1e-4, f"largest difference {difference}"


@pytest.mark.parametrize("dtype", ["bfloat16", "half"])
@pytest.mark.parametrize(
    "name",
    ["llama-yarn", "mistral-window", "qwen3", "opt", "gemma3", "gemma4", "olmo2", "cohere", "granite", "gpt2"],
)
def test_lower_precision_stays_near(name: str, dtype: str, device: str, tmp_path: Path) -> None:
    """Against float32: the error is that of the dtype, or at most that of transformers in it. One run decodes and
    prefills."""
    theirs = BY_NAME[name].save(tmp_path).to(device)
    ids = np.random.default_rng(4).integers(2, VOCAB, 90).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids], device=device)).logits[0]
    got = all_logits(start(tmp_path, device=device, dtype=dtype), ids, [30, 1, 1, 58])

    def error(logits: torch.Tensor) -> float:
        return float((logits.float() - expected).square().mean().sqrt() / expected.std())

    if error(got) >= {"bfloat16": 0.06, "half": 0.01}[dtype]:
        with torch.no_grad():
            own = theirs.to({"bfloat16": torch.bfloat16, "half": torch.half}[dtype])(torch.tensor([ids], device=device))
        assert error(got) < error(own.logits[0])


@pytest.mark.parametrize("name", ["llama-yarn", "mistral-window", "qwen2", "qwen3", "opt"])
def test_bfloat16_tokens_by_a_float64_reference(name: str, device: str, tmp_path: Path) -> None:
    """Steps as in serving, on a GPU in graphs ahead of the host: a token that float64 would not choose scores there
    as much less as transformers' own bfloat16 is wrong about two tokens at most."""
    half = BY_NAME[name].save(tmp_path).bfloat16()
    exact = copy.deepcopy(half).double()
    for options, preempt_at in (({"depth": 1}, ()), ({"chunk": 7, "depth": 1}, (5, 17))):
        driver = Driver(start(tmp_path, device=device, dtype="bfloat16"), seed=9, **options)
        sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        streams = [driver.add(p, sampling, preempt_at=preempt_at) for p in prompts()]
        driver.run()
        same = []
        for stream in streams:
            ids, first = torch.tensor([stream.prompt + stream.output]), len(stream.prompt) - 1
            with torch.no_grad():
                scores = exact(ids).logits[0, first:-1]
                wrong = float((half(ids).logits[0, first:-1].double() - scores).abs().max())
            chosen = scores.gather(1, torch.tensor(stream.output)[:, None])[:, 0]
            assert float((scores.amax(1) - chosen).max()) <= 2 * wrong
            same += (scores.argmax(1) == torch.tensor(stream.output)).tolist()
        assert sum(same) > 0.85 * len(same)


def test_greedy_tokens_alone_and_batched(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone equals transformers; batched, chunked and preempted equal alone. All up to ties."""
    sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    score, ties = greedy_score(pair.theirs), Ties()
    alone = []
    for i, prompt in enumerate(prompts()):
        driver = Driver(pair.ours, seed=i)
        stream = driver.add(prompt, sampling)
        driver.run()
        alone.append(stream.output)
        # transformers' choice at each position given our tokens: if all are equal, its own run gives the same tokens
        with torch.no_grad():
            logits = pair.theirs(torch.tensor([prompt + stream.output], device=pair.theirs.device)).logits[0]
        theirs = logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        ties.compare(f"{pair.tiny.name} prompt {i}", prompt, theirs, stream.output, score)
    runs = {
        "batched": ({}, ()),
        "batched, one plan ahead": ({"depth": 1}, ()),
        "chunked": ({"chunk": 7, "depth": 1}, ()),
        "preempted": ({"chunk": 20, "depth": 1}, (5, 17, 18)),
    }
    for name, (options, preempt_at) in runs.items():
        driver = Driver(pair.ours, seed=9, **options)
        streams = [driver.add(p, sampling, preempt_at=preempt_at[i % 3 :]) for i, p in enumerate(prompts())]
        driver.run()
        for i, stream in enumerate(streams):
            ties.compare(f"{pair.tiny.name} {name} {i}", stream.prompt, alone[i], stream.output, score)
    with capsys.disabled():
        print(f"\n{pair.tiny.name}: {ties.check()}", end="")


def test_transformers_own_generate(tmp_path: Path) -> None:
    """The test above feeds our tokens to transformers' model; here it generates itself, past a dynamic RoPE length."""
    tiny = BY_NAME["llama-dynamic"]
    tiny.fields["max_position_embeddings"] = 40
    try:
        theirs = tiny.save(tmp_path)
    finally:
        tiny.fields["max_position_embeddings"] = 256
    prompt = prompts()[3]
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    driver = Driver(start(tmp_path))
    stream = driver.add(prompt, Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True))
    driver.run()
    assert stream.output == expected[0, len(prompt) :].tolist()
