"""Preempted sequences whose KV is fetched from host memory give the same tokens as without preemption, up to ties."""

from pathlib import Path

import numpy as np
import pytest
import torch
from core_loop import CoreLoop
from plan_driver import Driver, as_bytes
from ties import Score, Ties
from tiny_models import BY_NAME, VOCAB, greedy_score
from tiny_models import start as start_on

from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import BlockFetch, BlockSave, FullBlock, Sampling, SlotRun, SlotStart, Stats, StepPlan

NUM_STREAMS = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY_BLOCK = 3 * 2 * 2 * 8 * 16 * 4  # bytes: layers, K and V, heads, tokens, head size, float32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Score]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return folder, greedy_score(BY_NAME["llama"].save(folder))


def start(folder: Path, **fields: object) -> Runner:
    return start_on(folder, device=DEVICE, **fields)


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, 20 + 7 * seed).tolist()


def sampling_of(seed: int) -> Sampling:
    """Greedy for even seeds, seeded sampling for odd ones."""
    return Sampling(max_tokens=50, temperature=0.7 * (seed % 2), seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny: tuple[Path, Score]) -> list[list[int]]:
    """The output of each stream alone."""
    runner = start(tiny[0], max_model_len=256)
    outputs = []
    for seed in range(NUM_STREAMS):
        driver = Driver(runner)
        stream = driver.add(prompt_of(seed), sampling_of(seed))
        driver.run()
        outputs.append(stream.output)
    return outputs


def crowd(runner: Runner, depth: int, **settings: object) -> tuple[CoreLoop, Stats]:
    loop = CoreLoop(runner, depth, **settings)
    for seed in range(NUM_STREAMS):
        loop.add(f"r{seed}", prompt_of(seed), sampling_of(seed))
    return loop, loop.run()


def host_gib(blocks: int) -> float:
    return blocks * TINY_BLOCK / 2**30


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_swapped_out_and_in(
    tiny: tuple[Path, Score],
    expected: list[list[int]],
    depth: int,
    prefix_caching: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, score = tiny
    runner = start(folder, num_gpu_blocks_override=33, max_model_len=256, swap_space_gib=host_gib(200))
    assert runner.geometry.num_host_blocks == 200
    loop, stats = crowd(runner, depth, prefix_caching=prefix_caching)
    assert stats.preemptions_total > 0
    assert min(stats.blocks_saved_total, stats.blocks_fetched_total) > 4
    ties = Ties()
    for seed in range(NUM_STREAMS):
        prompt, got = prompt_of(seed), loop.outputs[f"r{seed}", 0]
        if seed % 2:
            assert got == expected[seed], f"r{seed}"
            ties.tokens += len(got)
        else:
            ties.compare(f"r{seed}", prompt, expected[seed], got, score)
    with capsys.disabled():
        print(
            f"\nswap, depth {depth}: {stats.preemptions_total} preemptions, {stats.blocks_saved_total} blocks saved, "
            f"{stats.blocks_fetched_total} fetched, {ties.check()}",
            end="",
        )


def test_host_memory_saves_prefill_tokens(tiny: tuple[Path, Score]) -> None:
    computed = []
    for gib in (0.0, host_gib(200)):
        runner = start(tiny[0], num_gpu_blocks_override=33, max_model_len=256, swap_space_gib=gib)
        _, stats = crowd(runner, 1)
        computed.append(stats.prompt_tokens_total)
    assert computed[1] < 0.7 * computed[0]


def test_a_new_scheduler_finds_the_blocks_in_host_memory(tiny: tuple[Path, Score]) -> None:
    folder, _ = tiny
    runner = start(folder, num_gpu_blocks_override=32, max_model_len=256, swap_space_gib=host_gib(100))
    prompts = [np.random.default_rng(90 + i).integers(2, VOCAB, 200).tolist() for i in range(3)]
    first = CoreLoop(runner)
    for i, prompt in enumerate(prompts):
        first.add(f"a{i}", prompt, Sampling(max_tokens=4, temperature=0.0))
        first.run()
    second = CoreLoop(runner)
    second.add("again", prompts[0], Sampling(max_tokens=4, temperature=0.0))
    stats = second.run()
    assert stats.blocks_fetched_total >= 20
    assert stats.prefix_hits_total == 24 * 8
    assert second.outputs["again", 0] == first.outputs["a0", 0]


def done_by(runner: Runner, plan: StepPlan) -> CompletedPlan:
    runner.launch(plan)
    while not (done := runner.collect()):
        pass
    return done[0]


def test_a_failed_fetch_is_reported_and_its_slot_has_no_result(tiny: tuple[Path, Score]) -> None:
    """Host block 1 is empty: the slot that starts on it has no result, nor has a slot that reads its blocks."""
    folder, _ = tiny
    runner = start(folder, max_model_len=256, swap_space_gib=host_gib(8))
    prompt, size = prompt_of(5), 8
    greedy = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    runner.reset(8)

    def begin(slot: int, blocks: list[int], num_found: int) -> SlotStart:
        return SlotStart(slot, as_bytes(prompt), len(prompt), num_found * size, blocks, greedy, 0)

    names = [FullBlock(i, bytes([i]) * 16) for i in range(3)]
    runner.execute(StepPlan(1, 1, [], [begin(0, list(range(10)), 0)], [], [SlotRun(0, 100)], names))
    saves = [BlockSave(i, i * 2, bytes([i]) * 16) for i in range(3)]
    assert done_by(runner, StepPlan(1, 2, [0], [], [], [], [], saves)).failed_fetches == []
    fetches = [BlockFetch(0, 20), BlockFetch(1, 21), BlockFetch(4, 22)]
    starts = [begin(1, [20, 21, 22, *range(30, 37)], 3), begin(2, [20, *range(40, 49)], 1)]
    told = [FullBlock(b, b"t" * 16) for b in (20, 21, 33)]
    done = done_by(runner, StepPlan(1, 3, [], starts, [], [SlotRun(1, 100), SlotRun(2, 100)], told, fetches=fetches))
    assert done.failed_fetches == [21]
    assert [r.slot for r in done.all_results] == [2]
    assert {21, 33}.isdisjoint(runner.block_hashes.blocks_and_hashes()[0])
    reads = [begin(3, [33, *range(50, 59)], 1)]
    done = done_by(runner, StepPlan(1, 4, [], reads, [], [SlotRun(1, 1), SlotRun(3, 100)]))
    assert (done.failed_fetches, done.all_results) == ([33], [])
    again = begin(4, [21, *range(60, 69)], 0)
    done = done_by(runner, StepPlan(1, 5, [1, 3], [again], [], [SlotRun(4, 100)]))
    assert [r.slot for r in done.all_results] == [4]


def test_swap_space_above_the_free_memory_and_below_a_block(tiny: tuple[Path, Score]) -> None:
    folder, _ = tiny
    with pytest.raises(LoadError, match=r"--swap-space 1e\+06: .* of host memory are free"):
        start(folder, swap_space_gib=1e6)
    with pytest.raises(LoadError, match=r"--swap-space 1e-06: one KV block has 6 KiB"):
        start(folder, swap_space_gib=1e-6)
