"""A worker whose ranks are processes moves experts of skewed routing between its steps: its tokens stay the same."""

import json
from pathlib import Path

import msgspec
import pytest
from plan_driver import Driver
from rank_group import Group, config, report

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.worker import ExpertBalance, WorkerConfig
from blockyard.shared.messages import Sampling, Stats

BAR = 1.15  # the fullest rank to the mean
MODEL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 64,
    "num_experts_per_tok": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SAMPLING = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
ROUNDS = 2  # of prompts in an interval


def settled(folder: Path, *sizes: int, **fields: object) -> WorkerConfig:
    made = config(folder, *sizes, load_format="dummy-skewed", **fields)
    return msgspec.structs.replace(made, num_gpu_blocks_override=100, max_num_batched_tokens=512, swap_space_gib=0.0)


def answers(runner: Runner | None, first: int) -> list[list[int]]:
    """The tokens of 12 steps or more, of prompts that differ by `first`."""
    assert runner is not None
    driver = Driver(runner, num_slots=8)
    streams = [driver.add([(first + 37 * i + 11 * j * j) % 500 + 2 for j in range(40)], SAMPLING) for i in range(8)]
    driver.run()
    return [stream.output for stream in streams]


@pytest.mark.parametrize(("size", "num_stages", "levels"), [(4, 1, [0]), (2, 2, [0, 1, 2])])
def test_the_fullest_rank_comes_near_the_mean(size: int, num_stages: int, levels: list[int], tmp_path: Path) -> None:
    """levels: of sleep, before experts move. After the deeper one they are where they were at the start."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    balance = ExpertBalance(interval_steps=12 * ROUNDS, window_steps=12 * ROUNDS - 4)
    made = Group(settled(folder, size, num_stages, expert_parallel=True, expert_balance=balance), tmp_path)
    try:
        runner = SleepingRunner(made.start, lambda: 0)
        expected = answers(made.runner, 0)
        if num_stages == 1:  # dummy weights of stages are others
            assert expected == answers(engine.start(settled(folder, 1), report), 0)
        for level in levels:
            if level:
                runner.sleep(level)
                runner.reset(0)
            before, after = (interval(made, runner) for _ in range(2))
            assert before > 1.4 if level != 1 else before <= BAR
            assert after <= BAR, f"{before} before, of the mean"
            assert runner.count(Stats()).experts_moved_total >= 2 * MODEL["num_hidden_layers"]
            assert answers(made.runner, 0) == expected
    finally:
        made.team.close()
    assert not made.errors


def interval(made: Group, runner: SleepingRunner) -> float:
    """Runs the steps of an interval. Returns the load of the fullest rank over the mean, in the worst layer."""
    for first in range(7, 7 + 7 * ROUNDS, 7):
        answers(made.runner, first)
    return max(runner.count(Stats()).expert_rank_loads)
