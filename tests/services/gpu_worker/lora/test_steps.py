"""Sequences with and without adapters in the steps of a runner."""

from pathlib import Path

import pytest
import torch
from peft_adapters import Batch, load_adapters, save_adapter
from slot_plans import greedy, prompt_of
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.messages import AdapterPlaced

LORA = LoraConfig(max_loras=2, max_cpu_loras=3)
STEPS = 6


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base model and two adapters."""
    tiny, base = BY_NAME["llama"], tmp_path_factory.mktemp("base")
    found = [base]
    for seed, targets in ((1, ["q_proj", "down_proj"]), (2, ["v_proj", "up_proj", "lm_head"])):
        folder = tmp_path_factory.mktemp("adapter")
        save_adapter(tiny.save(base), folder, seed, target_modules=targets)
        found.append(folder)
    return found


def loaded(folders: list[Path], device: str, **fields: object) -> Runner:
    runner = start(folders[0], lora=LORA, device=device, **fields)
    runner.reset(8)
    load_adapters(runner, folders[1:])
    return runner


def run(runner: Runner, places: list[int | None], placed: list[AdapterPlaced]) -> list[list[tuple[list[int], float]]]:
    return Batch(runner, places, placed).run(STEPS)


def alone(runner: Runner, place: int | None, slot: int, number: int) -> list[tuple[list[int], float]]:
    """The sequence of a slot as `run` computes it beside others, all of which have its adapter."""
    runner.reset(8)
    placed = [] if place is None else [AdapterPlaced(place, number)]
    return run(runner, [place] * (slot + 1), placed)[slot]


def test_a_mixed_batch_is_as_each_adapter_alone(folders: list[Path], device: str) -> None:
    runner = loaded(folders, device)
    mixed = run(runner, [0, None, 1, 0, None], [AdapterPlaced(0, 1), AdapterPlaced(1, 2)])
    for slot, (place, number) in enumerate([(0, 1), (None, 0), (1, 2), (0, 1), (None, 0)]):
        expected = alone(runner, place, slot, number) if number == 0 else _with(folders, device, place, slot, number)
        assert [ids for ids, _ in mixed[slot]] == [ids for ids, _ in expected]
        assert [p for _, p in mixed[slot]] == pytest.approx([p for _, p in expected], abs=1e-4)
    assert mixed[0] != mixed[3]


def _with(folders: list[Path], device: str, place: int | None, slot: int, number: int) -> list[tuple[list[int], float]]:
    return alone(loaded(folders, device), place, slot, number)


def test_a_batch_invariant_sequence_has_the_same_bits_beside_others(folders: list[Path], device: str) -> None:
    runner = loaded(folders, device, batch_invariant=True)
    mixed = run(runner, [0, None, 1, 0], [AdapterPlaced(0, 1), AdapterPlaced(1, 2)])
    assert mixed[3] == _with_invariant(folders, device, 0, 3, 1)
    assert mixed[2] == _with_invariant(folders, device, 1, 2, 2)
    assert mixed[1] == _with_invariant(folders, device, None, 1, 0)


def _with_invariant(
    folders: list[Path], device: str, place: int | None, slot: int, number: int
) -> list[tuple[list[int], float]]:
    return alone(loaded(folders, device, batch_invariant=True), place, slot, number)


def test_base_sequences_have_the_bits_of_a_worker_without_adapters(folders: list[Path], device: str) -> None:
    """Also after steps with adapters. On a GPU each worker times its kernels and may choose others."""
    runner, plain = loaded(folders, device), start(folders[0], device=device)
    plain.reset(8)
    expected = run(plain, [None, None, None], [])
    before = run(runner, [None, None, None], [])
    if device == "cpu":
        assert before == expected
    for got, want in zip(before, expected, strict=True):
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert [p for _, p in got] == pytest.approx([p for _, p in want], abs=1e-4)
    runner.reset(8)
    with_adapter = run(runner, [0, 0, 0], [AdapterPlaced(0, 1)])
    assert with_adapter != before
    runner.reset(8)
    assert run(runner, [None, None, None], []) == before


def test_a_place_that_gets_another_adapter(folders: list[Path], device: str) -> None:
    runner = loaded(folders, device)
    first = run(runner, [0], [AdapterPlaced(0, 1)])
    runner.batch.reset(8)
    assert run(runner, [0], [AdapterPlaced(0, 2)]) != first
    runner.batch.reset(8)
    assert run(runner, [0], [AdapterPlaced(0, 1)]) == first


def test_prompt_logprobs_are_of_the_adapter(folders: list[Path], device: str) -> None:
    """Of an adapter of the head, too."""
    runner = loaded(folders, device)
    found = []
    for place in (None, 1):
        runner.batch.reset(8)
        sampling = greedy(num_prompt_logprobs=0)
        [result] = Batch(runner, [place], [AdapterPlaced(1, 2)], sampling, [prompt_of(9, 50)]).first()
        found.append([one.logprob for one in result.prompt_logprobs])
    assert len(found[0]) == 8 and all(abs(a - b) > 1e-4 for a, b in zip(*found, strict=True))
