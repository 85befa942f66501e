"""Greedy and seeded outputs do not depend on scheduling: up to ties, or exactly if batch-invariant.

tests/bench/scheduling/bench_equality.py does the same with many more tokens.
"""

import pytest
import torch
from equality import CONDITIONS, Bench, Request, requests
from kept_forms import FORMS
from ties import Ties


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(8, max_tokens=20)


FALLBACK = "llama by transformers"  # with windows in all layers, nothing would be preempted
DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "batch-invariant"])
def batch_invariant(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


QUANTIZED = [f"mixtral in {form}" for form in FORMS]  # products alone are others than in other models
OF_QUANTIZED = ("chunked", "preempted, depth 3", "data parallel 2")
# without those that differ in the number of plans ahead alone
OF_FAMILIES = ("chunked", "run-ahead depth 1", "preempted, depth 3", "swapped", "prefix hit", "data parallel 2")


# qwen3-moe: layers with experts and one without; gemma3: windows and other rotations in some layers; gemma4: other
# heads in them, and experts beside the MLP; deepseek-v3: latent attention, in groups of experts
@pytest.fixture(
    scope="module", params=["llama", "qwen3-moe", "gemma3", "gemma4-sees", "deepseek-v3", FALLBACK, *QUANTIZED]
)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DEVICES)
def it(
    request: pytest.FixtureRequest, batch_invariant: bool, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    name, _, model_impl = model.partition(" by ")
    name, _, form = name.partition(" in ")
    folder, written = tmp_path_factory.mktemp("tiny"), None
    if form:
        if not batch_invariant and form != "W4A16":
            pytest.skip("the same as W4A16, or inputs are rounded, and a last bit may decide how")
        written = FORMS[form].write(folder, name)
    return Bench(folder, batch_invariant, request.param, name, model_impl or "auto", written)


def test_every_way_of_scheduling_gives_the_output_of_each_choice_alone(
    it: Bench, batch_invariant: bool, model: str, asked: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    expected, ties = it.alone(asked), Ties()
    conditions = {"llama": CONDITIONS, **dict.fromkeys(QUANTIZED, OF_QUANTIZED)}.get(model, OF_FAMILIES)
    for name in conditions:
        it.compare(name, asked, expected, CONDITIONS[name](it, asked), ties)
    if batch_invariant:
        assert not ties.ties
    with capsys.disabled():
        print(f"\nequality of {model}{', batch-invariant' if batch_invariant else ''}: {ties.check()}", end="")
