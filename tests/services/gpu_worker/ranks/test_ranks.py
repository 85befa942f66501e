"""A leader with follower processes gives the tokens of one rank, however its sequences are scheduled, and after sleep.

A follower that is killed, stopped or fails ends the leader.
"""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from equality import BLOCK_BYTES, FEW, MAX_MODEL_LEN, noisy, requests, run
from rank_group import Group, config, report
from ties import Ties
from tiny_models import BY_NAME, greedy_score, settings

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.execution import ranks
from blockyard.services.gpu_worker.execution.cuda import follower_steps
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.parallel.commands import Begin, CopyBlocks
from blockyard.services.gpu_worker.ranks.leader_team import LeaderTeam
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.errors import ConfigError, DeviceError, LoadError, RankLostError
from blockyard.shared.messages import Sampling, SlotRun, SlotStart, StepPlan

ASKED = requests(12, 16)
DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    BY_NAME["llama"].save(folder)
    return folder


@pytest.fixture
def group(folder: Path, tmp_path: Path) -> Iterator[Group]:
    made = Group(config(folder, max_parallel_loading=1), tmp_path)
    yield made
    made.team.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "num_stages", "levels"), [(2, 1, [0]), (1, 2, [0]), (2, 2, [0, 2])])
def test_tokens_are_those_of_one_rank(
    tmp_path: Path, size: int, num_stages: int, levels: list[int], device: str
) -> None:
    """With few blocks: sequences are preempted, swapped and forked. levels: of sleep before. The ranks share a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    folder = tmp_path / "model"
    score = greedy_score(BY_NAME["llama"].save(folder))
    fields = {"device": device, "graph_sizes": [8]}  # larger steps are eager
    alone = engine.start(config(folder, 1, **fields), report)
    expected = run(alone, ASKED)[0].outputs
    made = Group(config(folder, size, num_stages, **fields), tmp_path)
    try:
        runner, ties = SleepingRunner(made.start, lambda: 0), Ties()
        for level in levels:
            if level:
                runner.sleep(level)
                runner.reset(0)
            got, stats = run(made.runner, ASKED, depth=2)
            assert stats.blocks_fetched_total
            assert device == "cuda" or got.most_launched >= num_stages, "each stage computes a plan"
            for request in ASKED:
                for choice in range(request.n):
                    place, judge = (request.name, choice), noisy(score, request.sampling, choice)
                    ties.compare(f"level {level}: {place}", request.prompt, expected[place], got.outputs[place], judge)
        assert runner.geometry.num_blocks == FEW
    finally:
        made.team.close()
    assert not made.errors


KILLED, STOPPED = (signal.SIGKILL, 2.0, "has ended with code -9"), (signal.SIGSTOP, 7.0, "is silent for")


@pytest.mark.parametrize(
    ("size", "num_stages", "rank", "number", "most_s", "said"),
    [(2, 1, 1, *KILLED), (2, 2, 1, *KILLED), (1, 3, 2, *KILLED), (2, 1, 1, *STOPPED), (1, 3, 2, *STOPPED)],
)
def test_a_lost_follower_ends_the_leader(
    folder: Path,
    tmp_path: Path,
    size: int,
    num_stages: int,
    rank: int,
    number: signal.Signals,
    most_s: float,
    said: str,
) -> None:
    group = Group(config(folder, size, num_stages), tmp_path)
    try:
        group.start()
        pids = {one.rank: one.pid for one in group.team.stats() if one.rank}
        began = time.monotonic()
        os.kill(pids[rank], number)
        assert group.ended.wait(10)
        assert time.monotonic() - began < most_s
    finally:
        group.team.close()
    [error] = group.errors
    assert isinstance(error, RankLostError) and f"rank {rank} of {size * num_stages} {said}" in str(error)
    assert not group.team.failure
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_follower_whose_device_fails_is_not_a_lost_one(group: Group, tmp_path: Path) -> None:
    """The error of a step makes suspects; all ranks end."""
    group.start()
    assert [file.name for file in tmp_path.glob("*.lock")] == ["loading-0.lock"], "ranks have loaded one by one"
    before = group.team.stats()
    assert [one.rank for one in before] == [0, 1]
    assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{before[1].pid}/status").read_text()
    deadline = time.monotonic() + 5
    while not group.team.stats()[1].rss_bytes > 2**20:
        assert time.monotonic() < deadline, "the signs of life say how much memory a rank has"
        time.sleep(0.05)
    group.team.send(CopyBlocks(np.array([[10**6], [0]]).tobytes()))
    assert group.ended.wait(10)
    [error] = group.errors
    assert isinstance(error, DeviceError) and "rank 1: " in str(error) and group.team.failure == str(error)


def test_what_a_follower_refuses_is_the_leader_s_error(group: Group, folder: Path) -> None:
    """It loads at the leader's first command."""
    config_json, whole = folder / "config.json", (folder / "config.json").read_text("utf-8")
    config_json.write_text('{"architectures": ["NoSuchModel"]}', "utf-8")
    try:
        group.team.send(Begin([]))
        assert group.ended.wait(60)
    finally:
        config_json.write_text(whole, "utf-8")
    [error] = group.errors
    assert isinstance(error, ConfigError) and str(error).startswith("rank 1: ") and "NoSuchModel" in str(error)


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
def test_vectors_are_those_of_one_rank(folder: Path, tmp_path: Path, size: int, num_stages: int) -> None:
    """A decoder that pools, in two chunks."""

    def vector(runner: Runner) -> np.ndarray:
        runner.reset(1)
        ids = np.arange(2, 32, dtype="<u4").tobytes()
        start = SlotStart(0, ids, 30, 0, list(range(5)), Sampling(1), 0, has_text=False)
        runner.execute(StepPlan(0, 1, [], [start], [], [SlotRun(0, 11)]))
        [result] = runner.execute(StepPlan(0, 2, [], [], [], [SlotRun(0, 64)]))
        return np.frombuffer(result.vector, "<f4")

    expected = vector(engine.start(config(folder, 1, task="embed"), report))
    made = Group(config(folder, size, num_stages, task="embed"), tmp_path)
    try:
        np.testing.assert_allclose(vector(made.start()), expected, atol=1e-5)
    finally:
        made.team.close()


def test_a_stopped_leader_is_ended_by_its_follower(folder: Path, tmp_path: Path) -> None:
    """Its launcher sees an end sooner than a process that hangs."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "settings").write_bytes(msgspec.json.encode(config(folder)))
    command = [sys.executable, "-P", "-m", "waiting_leader", str(tmp_path / "settings"), str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as leader:
        try:
            assert leader.stdout is not None
            follower = int(leader.stdout.readline())
            leader.send_signal(signal.SIGSTOP)
            assert leader.wait(12) == -signal.SIGKILL
        finally:
            leader.kill()
    deadline = time.monotonic() + 2
    while Path(f"/proc/{follower}").exists():
        assert time.monotonic() < deadline, "the follower outlives its leader"
        time.sleep(0.05)


def test_more_ranks_than_query_heads_are_refused_before_anything_is_loaded(folder: Path, tmp_path: Path) -> None:
    team = LeaderTeam(config(folder, 5), tmp_path, lambda error: None)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 5 is more than the 4 query heads"):
        engine.start(config(folder, 5), report, team=team)
    team.close()


@pytest.mark.parametrize(
    ("num_stages", "fields", "said"),
    [
        (4, {}, "--pipeline-parallel-size 4 is more than the 3 layers of the model"),
        (2, {"pipeline_layers": [1, 1]}, "--pipeline-layers 1,1: 2 numbers of layers are needed, of 3 in all"),
        (2, {"model_impl": "transformers"}, "runs by its class in transformers, whose layers are not divided"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_anything_is_loaded(
    folder: Path, tmp_path: Path, num_stages: int, fields: dict[str, object], said: str
) -> None:
    asked = config(folder, 1, num_stages, **fields)
    team = LeaderTeam(asked, tmp_path, lambda error: None)
    with pytest.raises(ConfigError, match=said):
        engine.start(asked, report, team=team)
    team.close()


def test_stages_have_the_layers_that_are_asked_for(folder: Path, tmp_path: Path) -> None:
    """All have as many KV blocks as the one with the most layers has room for."""
    notes: list[str] = []
    size_bytes = 100 * BLOCK_BYTES
    fields = {"pipeline_layers": [2, 1], "kv_cache_memory_bytes": size_bytes, "pipeline_parallel_size": 2}
    asked = settings(folder, max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=None, **fields)
    team = LeaderTeam(asked, tmp_path, lambda error: None)
    team.start({})
    try:
        runner = engine.start(asked, lambda phase, progress, said: notes.extend(said), team=team)
        assert isinstance(runner, Runner)
        assert "pipeline: 2 stages; the last one has layers 2 to 2" in notes
        assert runner.model.shape.num_layers == 1
        names = runner.model.table.places.keys()
        assert not any("embed_tokens" in name or "layers.0." in name for name in names)
        assert runner.geometry.num_blocks == runner.pool.num_blocks == size_bytes // (BLOCK_BYTES * 2 // 3)
    finally:
        team.close()


@pytest.mark.parametrize(("layers", "short"), [([2, 1], 1), ([1, 2], 0)])
def test_a_rank_short_of_memory_is_named(folder: Path, tmp_path: Path, layers: list[int], short: int) -> None:
    """Each stage has room for 40 blocks of one layer, and a sequence needs 32 blocks. The leader has the last stage."""
    fields = {"pipeline_layers": layers, "kv_cache_memory_bytes": 40 * BLOCK_BYTES // 3, "pipeline_parallel_size": 2}
    group = Group(settings(folder, max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=None, **fields), tmp_path)
    try:
        with pytest.raises((LoadError, RankLostError)) as raised:
            group.start()
        assert short == 0 or group.ended.wait(10)
        error = raised.value if short == 0 else group.errors[0]
    finally:
        group.team.close()
    assert isinstance(error, LoadError)
    assert str(error).startswith(f"rank {short}: not enough memory for one sequence: {MAX_MODEL_LEN} tokens need")
    assert "--max-model-len 160 or less" in str(error)


def test_steps_of_followers_read_no_clock() -> None:
    """They follow from the stream alone, as do those of a leader in the same package."""
    files = [*Path(ranks.__file__).parent.glob("*.py"), Path(follower_steps.__file__)]
    assert len(files) > 5
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not {name.partition(".")[0] for name in names} & {"time", "datetime", "random", "secrets"}, file
