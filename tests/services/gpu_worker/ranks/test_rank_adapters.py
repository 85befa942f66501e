"""Sequences with and without adapters in the steps of a leader with followers: those of one rank, also after sleep."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft_adapters import Batch, load_adapters, save_adapter
from rank_group import Group, config, report
from slot_plans import greedy, prompt_of
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.messages import AdapterPlaced

LORA = LoraConfig(max_loras=2, max_cpu_loras=3)
BOTH = [AdapterPlaced(0, 1), AdapterPlaced(1, 2)]
Found = list[list[tuple[list[int], float]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base model and two adapters."""
    tiny, found = BY_NAME["llama"], [tmp_path_factory.mktemp("base")]
    for seed, targets in ((1, ["q_proj", "down_proj", "embed_tokens"]), (2, ["v_proj", "up_proj", "lm_head"])):
        folder = tmp_path_factory.mktemp("adapter")
        save_adapter(tiny.save(found[0]), folder, seed, target_modules=targets)
        found.append(folder)
    return found


def sequences(runner: Runner, folders: list[Path]) -> list[Found]:
    """Mixed batches, with the places as they are and with the adapters exchanged, and log-probabilities of prompts."""
    runner.reset(8)
    load_adapters(runner, folders[1:])
    found = [Batch(runner, [0, None, 1, 0], BOTH).run(4)]
    runner.reset(8)
    found.append(Batch(runner, [0, None], [AdapterPlaced(0, 2)]).run(3))
    runner.reset(8)
    scored = Batch(runner, [1, None], [AdapterPlaced(1, 2)], greedy(num_prompt_logprobs=0), [prompt_of(9, 50)] * 2)
    found.append([[([], one.logprob) for one in result.prompt_logprobs] for result in scored.first()])
    return found


def loaded_bytes(runner: Runner, folder: Path) -> int:
    """Of all ranks together."""
    adapters, done, end_s = runner.adapters, list[LoadedAdapter](), time.monotonic() + 30
    assert adapters is not None
    adapters.load(20, str(folder))
    while not done and time.monotonic() < end_s:
        done = adapters.poll()
    return done[0].size_bytes


def assert_same(got: list[Found], want: list[Found]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert [ids for ids, _ in a] == [ids for ids, _ in b]
            assert [p for _, p in a] == pytest.approx([p for _, p in b], abs=1e-4)


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[Found]:
    found = sequences(engine.start(config(folders[0], 1, lora=LORA), report), folders)
    assert found[0][0] != found[0][3] and found[2][0] != found[2][1]
    return found


@pytest.mark.parametrize(("size", "num_stages", "levels"), [(2, 1, (0, 1, 2)), (2, 2, (0,))])
def test_tokens_are_those_of_one_rank(
    folders: list[Path], tmp_path: Path, expected: list[Found], size: int, num_stages: int, levels: tuple[int, ...]
) -> None:
    """levels: of sleep. Without stages ranks divide both matrices."""
    lora = LoraConfig(max_loras=2, max_cpu_loras=3, fully_sharded=num_stages == 1)
    made = Group(config(folders[0], size, num_stages, lora=lora), tmp_path)
    try:
        sleeping = SleepingRunner(made.start, lambda: 0)
        for level in levels:
            if level:
                sleeping.sleep(level)
                sleeping.reset(0)
            assert isinstance(made.runner, Runner)
            assert_same(sequences(made.runner, folders), expected)
        if num_stages == 1:
            whole = loaded_bytes(start(folders[0], lora=LORA), folders[2])
            assert loaded_bytes(made.runner, folders[2]) == whole, "each number is on one rank"
    finally:
        made.team.close()
    assert not made.errors


@pytest.fixture
def pair(folders: list[Path], tmp_path: Path) -> Iterator[Runner]:
    made = Group(config(folders[0], lora=LORA), tmp_path)
    runner = made.start()
    runner.reset(8)
    yield runner
    made.team.close()
    assert not made.errors


def test_an_adapter_that_cannot_be_read_fails_with_the_cause_and_the_next_is_served(
    pair: Runner, folders: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    save_adapter(BY_NAME["llama-odd"].save(tmp_path / "odd"), other, target_modules=["q_proj"])
    adapters = pair.adapters
    assert adapters is not None
    adapters.load(7, str(other))
    adapters.load(8, str(tmp_path / "nowhere"))
    for _ in range(2):  # the second time before the first is answered
        adapters.load(9, str(folders[1]))
    done, end_s = {}, time.monotonic() + 30
    while adapters.is_loading and time.monotonic() < end_s:
        done |= {one.adapter: one for one in adapters.poll()}
    assert "this model has" in done[7].error and "is no folder" in done[8].error
    assert not done[9].error and done[9].size_bytes > loaded_bytes(start(folders[0], lora=LORA), folders[1])
    adapters.load(10, str(folders[1]))
    adapters.reset()  # answers to what was asked before are none of a later load
    load_adapters(pair, folders[1:])
