"""Models with a window in every layer hold only the blocks of the window, and never read blocks that they freed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from core_loop import CoreLoop
from plan_driver import Driver
from ties import Score, Ties
from tiny_models import BY_NAME, VOCAB, greedy_score
from tiny_models import start as start_on

from blockyard.services.gpu_worker.memory import GIB, KVMemoryNeed, plan_cpu
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.geometry import window_of
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import Sampling

WINDOW, SIZE, NUM_STREAMS = 20, 8, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Score]:
    folder: Path = tmp_path_factory.mktemp("window")
    return folder, greedy_score(BY_NAME["mistral-window"].save(folder))


def start(folder: Path, **fields: object) -> Runner:
    return start_on(folder, device=DEVICE, **fields)


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, 40 + 30 * seed).tolist()


def greedy(max_tokens: int = 60) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Poisoned(CoreLoop):
    """Fills all blocks that the core counts as free with large numbers whenever plans are made.

    Not with NaN: a batch is padded with blocks of any sequence, and their finite values are multiplied by 0.
    """

    most_used = 0

    def turn(self) -> None:
        super().turn()
        memory = self.runner.pool.runs[0]
        for group in self.core.groups.values():  # none until the worker has answered
            self.most_used = max(self.most_used, group.kv_cache.blocks.num_used)
            with torch.inference_mode():
                memory[:, group.kv_cache.blocks.uncached.free_ids()] = 1e4


def expected(folder: Path) -> list[list[int]]:
    runner, outputs = start(folder, max_model_len=256), []
    for seed in range(NUM_STREAMS):
        driver = Driver(runner)
        stream = driver.add(prompt_of(seed), greedy())
        driver.run()
        outputs.append(stream.output)
    return outputs


@pytest.mark.parametrize(("depth", "chunk", "prefix_caching"), [(0, 16, True), (1, 200, False), (3, 16, False)])
def test_sequences_need_fewer_blocks_than_their_tokens_would_fill(
    tiny: tuple[Path, Score], depth: int, chunk: int, prefix_caching: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sequence of up to 220 tokens would fill 28 blocks; five of them share 12."""
    folder, score = tiny
    runner = start(folder, max_model_len=256, num_gpu_blocks_override=12, max_num_batched_tokens=chunk)
    assert runner.geometry.window == WINDOW
    loop, ties = Poisoned(runner, depth, chunk=chunk, prefix_caching=prefix_caching), Ties()
    for seed in range(NUM_STREAMS):
        loop.add(f"r{seed}", prompt_of(seed), greedy())
    loop.run()
    for seed, wanted in enumerate(expected(folder)):
        ties.compare(f"r{seed}", prompt_of(seed), wanted, loop.outputs[f"r{seed}", 0], score)
    with capsys.disabled():
        print(f"\nwindow of {WINDOW}, depth {depth}, chunks of {chunk}: {ties.check()}", end="")


def test_a_long_sequence_holds_only_its_window(tiny: tuple[Path, Score]) -> None:
    runner = start(tiny[0], max_model_len=256, max_num_batched_tokens=16, num_gpu_blocks_override=100)
    loop = Poisoned(runner, depth=1, chunk=16)
    loop.add("long", prompt_of(0), greedy(200))
    loop.run()
    assert len(loop.outputs["long", 0]) == 200
    assert loop.most_used <= -(-(WINDOW + 16) // SIZE) + 2


def test_only_the_window_of_a_prefix_has_to_be_cached(tiny: tuple[Path, Score]) -> None:
    """12 blocks cannot hold 140 tokens; a hit needs only the blocks that are left."""
    runner = start(tiny[0], max_model_len=256, max_num_batched_tokens=32, num_gpu_blocks_override=12)
    loop = Poisoned(runner, depth=0, chunk=32)
    prompt = prompt_of(3)[:130]
    loop.add("first", prompt, greedy(4))
    loop.run()
    loop.add("again", prompt, greedy(4))
    stats = loop.run()
    assert stats.prefix_hits_total == 128
    assert loop.outputs["again", 0] == loop.outputs["first", 0]


def test_without_a_window_all_blocks_are_kept(tmp_path: Path) -> None:
    BY_NAME["qwen2-window"].save(tmp_path)
    assert start(tmp_path, max_model_len=256).geometry.window is None
    assert window_of([4, 9, 4], 100) == 9
    assert window_of([4, None], 100) is None
    assert window_of([100, 100], 100) is None


def test_memory_is_planned_for_the_blocks_of_the_window(tiny: tuple[Path, Score]) -> None:
    need = KVMemoryNeed(
        block_size=16,
        block_bytes=1 << 20,
        max_model_len=32768,
        max_num_seqs=2,
        window=1000,
        max_step_tokens=512,
    )
    plan = plan_cpu(need, 64 * GIB, None, None)
    assert plan.num_blocks == 2 * -(-(1000 + 32 + 512) // 16)
    assert "x the 1032 that a sequence holds (sliding window 1000)" in plan.notes[-1]
    with pytest.raises(LoadError, match=r"1032 tokens need .* set --num-gpu-blocks-override 65 or more"):
        plan_cpu(need, 64 * GIB, None, 64)


def test_a_runner_of_the_whole_pool(tiny: tuple[Path, Score]) -> None:
    runner: Runner = start(tiny[0], max_model_len=256, num_gpu_blocks_override=5)
    assert CoreLoop(runner).core.card.max_model_len == 256
    with pytest.raises(LoadError, match="--num-gpu-blocks-override 5 or more"):
        start(tiny[0], max_model_len=256, num_gpu_blocks_override=4)
