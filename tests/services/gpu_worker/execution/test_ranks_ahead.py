"""The steps of a GPU on two ranks, with its operations in plain torch: the follower is a thread.

Prefills and decodes ahead of the host, chunks, preemption, log-probabilities: the tokens are those of one rank.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from equality import noisy
from peft_adapters import Batch, load_adapters, save_adapter
from plan_driver import Driver, Stream
from reference_ops import ReferenceOps
from ties import Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, settings, start
from two_ranks import CAPACITY, TwoRanks

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.engine import read_settings
from blockyard.services.gpu_worker.execution.cuda import pooled_attention
from blockyard.services.gpu_worker.pooling.selection import choose_output
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.messages import AdapterPlaced, Sampling, SlotRun, SlotStart, StepPlan

TARGETS = {  # of two adapters; on GPUs experts are no layers that they may change
    "llama": (["q_proj", "o_proj", "down_proj"], ["k_proj", "gate_proj", "up_proj", "lm_head"]),
    "deepseek-v3": (["kv_b_proj", "q_b_proj"], ["kv_b_proj", "o_proj"]),
}
NAMES = ("llama", "gemma4-moe", "deepseek-v3")
LAYOUTS = [*((name, 2, 1) for name in NAMES), ("gemma4-moe", 1, 2)]  # ranks of a stage, and stages


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def streams(driver: Driver) -> list[Stream]:
    rng = np.random.default_rng(3)
    made = []
    for i, length in enumerate((1, 3, 17, 40, 64)):
        sampling = Sampling(12, 0.8 * (i % 2), seed=i, ignore_eos=True, num_logprobs=2, presence_penalty=0.3 * (i == 1))
        made.append(driver.add(rng.integers(2, VOCAB, length).tolist(), sampling, preempt_at=(5,) if i == 3 else ()))
    driver.run()
    return made


@pytest.mark.parametrize(("name", "size", "num_stages"), LAYOUTS)
def test_tokens_are_those_of_one_rank(name: str, size: int, num_stages: int, tmp_path: Path, threads: None) -> None:
    folder, group = tmp_path / "model", tmp_path / "group"
    group.mkdir()
    score = greedy_score(BY_NAME[name].save(folder))
    alone = start(folder, max_num_seqs=CAPACITY)
    expected = streams(Driver(alone, num_slots=CAPACITY))
    ranks, ties = TwoRanks(folder, group, alone.geometry, size, num_stages), Ties()
    try:
        for options in ({"depth": 3}, {"depth": 2, "chunk": 9}):
            for i, (one, own) in enumerate(
                zip(expected, streams(Driver(ranks.runner, num_slots=CAPACITY, **options)), strict=True)
            ):
                if i != 1:  # the judge knows no penalties
                    judge = noisy(score, one.sampling, 0)
                    ties.compare(f"{options} {i}", one.prompt, one.output, own.output, judge)
                else:
                    assert own.output == one.output
    finally:
        ranks.close()
    assert any(one.num_starts for one in ranks.forwards)
    assert any(one.num_starts == 0 and one.num_logits < 0 for one in ranks.forwards)


@pytest.mark.parametrize(("name", "size", "num_stages"), [("llama", 2, 1), ("deepseek-v3", 2, 1), ("llama", 1, 2)])
def test_adapters_divided_among_ranks(name: str, size: int, num_stages: int, tmp_path: Path, threads: None) -> None:
    """Both matrices of a pair, in graphs with and without adapters."""
    folder, group, adapters = tmp_path / "model", tmp_path / "group", list[Path]()
    group.mkdir()
    for seed, targets in enumerate(TARGETS[name]):
        adapters.append(tmp_path / str(seed))
        save_adapter(BY_NAME[name].save(folder), adapters[-1], seed, target_modules=targets)
    alone = start(folder, max_num_seqs=CAPACITY, lora=LoraConfig(max_loras=2, max_cpu_loras=2))
    alone.reset(CAPACITY)
    load_adapters(alone, adapters)
    ranks, mixed = TwoRanks(folder, group, alone.geometry, size, num_stages, adapters), [0, None, 1, 0]
    try:
        for places, placed in ((mixed, [AdapterPlaced(0, 1), AdapterPlaced(1, 2)]), ([None, None], [])):
            for runner in (alone, ranks.runner):
                runner.reset(CAPACITY)
            want, got = (Batch(runner, places, placed).run(5) for runner in (alone, ranks.runner))
            for a, b in zip(want, got, strict=True):
                assert [ids for ids, _ in a] == [ids for ids, _ in b]
                assert [p for _, p in a] == pytest.approx([p for _, p in b], abs=1e-4)
        assert {forward.has_adapters for forward in ranks.forwards} == {True, False}
    finally:
        ranks.close()


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
def test_vectors_are_those_of_one_rank(
    size: int, num_stages: int, tmp_path: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences in unlike chunks: followers get their block tables with the step."""
    monkeypatch.setattr(pooled_attention, "build_attention", lambda *given: ReferenceOps().attend(*given))
    folder, group = tmp_path / "model", tmp_path / "group"
    group.mkdir()
    BY_NAME["llama"].save(folder)
    config = settings(folder, max_num_seqs=CAPACITY, task="embed")
    alone = engine.start(config, lambda *_: None)
    assert isinstance(alone, Runner)
    output = choose_output(config, read_settings(config, StartReport(lambda *_: None)), alone.model)[1]
    ranks = TwoRanks(folder, group, alone.geometry, size, num_stages, output=output)
    try:
        want, got = (vectors(runner) for runner in (alone, ranks.runner))
        assert want.keys() == {0, 1} and got.keys() == {0, 1}
        for slot, vector in want.items():
            np.testing.assert_allclose(got[slot], vector, atol=1e-5)
    finally:
        ranks.close()


def vectors(runner: Runner) -> dict[int, np.ndarray]:
    runner.reset(CAPACITY)
    ids, starts = np.arange(2, 42, dtype="<u4"), list[SlotStart]()
    for slot, length in enumerate((30, 13)):
        blocks = list(range(8 * slot, 8 * slot + 8))
        starts.append(SlotStart(slot, ids[:length].tobytes(), length, 0, blocks, Sampling(1), 0, has_text=False))
    found = runner.execute(StepPlan(0, 1, [], starts, [], [SlotRun(0, 11), SlotRun(1, 1)]))
    found += runner.execute(StepPlan(0, 2, [], [], [], [SlotRun(0, 64), SlotRun(1, 64)]))
    return {one.slot: np.frombuffer(one.vector, "<f4") for one in found if one.finish is not None}
