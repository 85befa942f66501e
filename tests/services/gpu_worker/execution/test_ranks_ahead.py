"""The steps of a GPU on two ranks, with its operations in plain torch: the follower is a thread.

Prefills and decodes ahead of the host, chunks, preemption, log-probabilities: the tokens are those of one rank.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from equality import noisy
from peft_adapters import Batch, load_adapters, save_adapter
from placed_adapters import finished, read_adapter
from plan_driver import Driver, Stream
from rank_logits import CPU, connect, load, load_undivided
from reference_ops import ReferenceOps, run_ahead
from ties import Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, settings, start

from blockyard.kernels.lora.adapter_table import add_adapters_reference
from blockyard.kernels.lora.add_to_heads import add_to_heads_reference
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.engine import read_settings
from blockyard.services.gpu_worker.execution.cuda import pooled_attention
from blockyard.services.gpu_worker.execution.cuda.follower_steps import DeviceFollowerSteps
from blockyard.services.gpu_worker.execution.cuda.pooled_attention import TritonChunkAttention
from blockyard.services.gpu_worker.execution.pooled_steps import PooledSteps
from blockyard.services.gpu_worker.execution.ranks.follower import Follower
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror, LeaderModel, LeaderPool
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.lora.device_places import AdapterKernels, DevicePlaces
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.commands import Command, DeviceForward, Followers
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.pooling.output import PoolingOutput
from blockyard.services.gpu_worker.pooling.selection import choose_output
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.messages import AdapterPlaced, Geometry, Sampling, SlotRun, SlotStart, StepPlan
from blockyard.shared.messages.base import Frame

CAPACITY = 16
LIMITS = AdapterLimits(dtype=torch.float32, max_rank=16, fully_sharded=True)
KERNELS = AdapterKernels(add_adapters_reference, add_to_heads_reference)
TARGETS = {  # of two adapters; on GPUs experts are no layers that they may change
    "llama": (["q_proj", "o_proj", "down_proj"], ["k_proj", "gate_proj", "up_proj", "lm_head"]),
    "deepseek-v3": (["kv_b_proj", "q_b_proj"], ["kv_b_proj", "o_proj"]),
}
NAMES = ("llama", "gemma4-moe", "deepseek-v3")
LAYOUTS = [*((name, 2, 1) for name in NAMES), ("gemma4-moe", 1, 2)]  # ranks of a stage, and stages


class TwoRanks:
    """A leader's runner, and a follower in a thread that does what comes."""

    def __init__(
        self,
        folder: Path,
        group: Path,
        geometry: Geometry,
        size: int,
        num_stages: int,
        adapters: Sequence[Path] = (),
        output: PoolingOutput | None = None,
    ) -> None:
        """adapters: in places 0, 1, ... of the device. output: of a model that pools; None: it generates."""
        self._adapters = adapters
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._folder, self._group, self._geometry = folder, group, geometry
        self._size, self._num_stages = size, num_stages
        self.problem: Exception | None = None
        self.forwards: list[DeviceForward] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        ranks = connect(0, size, group, num_stages)
        model, send = self._load(ranks), self._send
        pool = self._pool(model)
        pool.mirror = LeaderPool(send)
        self.runner = Runner(LeaderModel(model, ranks, send), pool, geometry, None, lambda runner: None, send=send)
        if output is None:
            run_ahead(self.runner, CAPACITY, records_layers=False, masks=False, mirror=DeviceMirror(send))
        else:
            attention = TritonChunkAttention(pool, SameMemory(), has_followers=True)
            runner = self.runner
            runner.use(PooledSteps(runner.model, pool, runner.batch, geometry, output, attention))

    def _load(self, ranks: RankGroups) -> Model:
        model = load(self._folder, ranks)
        if self._adapters:
            undivided = load_undivided(self._folder)
            places = DevicePlaces(model, len(self._adapters), LIMITS, KERNELS, CPU, SameMemory())
            targets = ModelTargets(model, undivided, fully_sharded=LIMITS.fully_sharded)
            for place, folder in enumerate(self._adapters):
                places.put(place, finished(places.prepare(read_adapter(folder, targets, LIMITS))))
        return model

    def _send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        assert isinstance(frame, Command)
        if to is not Followers.LAST_STAGE or self._num_stages == 1:
            self._commands.put(frame)

    def _pool(self, model: Model) -> KVPool:
        return KVPool(model.shape, self._geometry.num_blocks, self._geometry.block_size, torch.float32, CPU)

    def _follow(self) -> None:
        try:
            ranks = connect(1, self._size, self._group, self._num_stages)
            model = self._load(ranks)
            pool = self._pool(model)
            steps = DeviceFollowerSteps(model, pool, ranks, self._geometry, ReferenceOps())
            follower = Follower(model, pool, None, steps)
            while (command := self._commands.get()) is not None:
                if isinstance(command, DeviceForward):
                    self.forwards.append(command)
                follower.do(command)
        except Exception as e:
            self.problem = e
            raise

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(10)
        assert self.problem is None


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
