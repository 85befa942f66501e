"""A worker frees memory while it sleeps, and computes the same tokens after it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_links import FakeLinks
from plan_driver import Driver
from tiny_models import BY_NAME, VOCAB, model_shape, start

from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights, storages
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.service import Worker
from blockyard.shared.messages import Attach, Attached, Fenced, Member, MemoryTag, Role, Sampling, Sleep, Slept, Wake
from blockyard.shared.process.service_main import rss_bytes

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = np.random.default_rng(3).integers(2, VOCAB, 40).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    BY_NAME["llama"].save(path)
    return path


def answer(runner: Runner) -> list[int]:
    driver = Driver(runner)
    stream = driver.add(PROMPT, GREEDY)
    driver.run()
    return stream.output


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [
        ("llama", "auto"),
        ("qwen3-moe", "auto"),
        ("gemma3", "auto"),
        ("deepseek-v3", "auto"),
        ("mistral-window", "transformers"),
    ],
)
@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same_before_and_after(tmp_path: Path, name: str, model_impl: str, level: int) -> None:
    BY_NAME[name].save(tmp_path)
    runners: list[Runner] = []

    def begin() -> Runner:
        runners.append(start(tmp_path, max_model_len=256, model_impl=model_impl))
        return runners[-1]

    sleeper = SleepingRunner(begin, rss_bytes)
    before = answer(runners[0])
    runners[0].block_hashes._host[3] = b"n" * 16
    memory = runners[0].pool.runs[0]
    assert memory.any()
    sleeper.sleep(level)
    sleeper.sleep(1)
    assert sleeper.level == level
    assert level == 2 or not memory.any(), "KV is gone"
    sleeper.reset(4)
    assert sleeper.level == 0
    assert (sleeper.block_hashes.blocks_and_hashes(), sleeper.block_hashes.host_blocks_and_hashes()) == (
        ([], b""),
        ([], b""),
    )
    assert len(runners) == level, "level 2 reads the weights again"
    assert answer(runners[-1]) == before


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("first", list(MemoryTag))
def test_weights_and_kv_are_restored_one_after_the_other(folder: Path, level: int, first: MemoryTag) -> None:
    runners: list[Runner] = []

    def begin() -> Runner:
        runners.append(start(folder, max_model_len=256))
        return runners[-1]

    sleeper = SleepingRunner(begin, rss_bytes)
    before = answer(runners[0])
    sleeper.sleep(level)
    sleeper.wake([first])
    assert sleeper.level == level, "the rest is missing"
    if level == 1:
        assert runners[0]._has_kv == (first is MemoryTag.KV_CACHE)
    else:  # KV waits for the weights
        assert [runner._has_kv for runner in runners[1:]] == ([False] if first is MemoryTag.WEIGHTS else [])
    sleeper.sleep(1)
    assert (sleeper.level, sleeper._woken) == (level, set()), "asleep again as before"
    sleeper.wake([first])
    sleeper.wake([part for part in MemoryTag if part is not first])
    sleeper.reset(4)
    assert (sleeper.level, sleeper._woken, runners[-1]._has_kv) == (0, set(), True)
    assert answer(runners[-1]) == before


def test_a_runner_that_fails_to_wake_is_created_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[Runner] = []

    def begin() -> Runner:
        runners.append(start(folder, max_model_len=256))
        return runners[-1]

    def fail(self: Runner, weights: bool = True, kv: bool = True) -> None:
        raise RuntimeError("CUDA out of memory")

    sleeper = SleepingRunner(begin, rss_bytes)
    before = answer(runners[0])
    sleeper.sleep(1)
    monkeypatch.setattr(Runner, "reclaim_memory", fail)
    sleeper.reset(4)
    assert (len(runners), sleeper.level) == (2, 0)
    assert answer(runners[1]) == before


def test_a_pool_in_host_memory_frees_its_pages() -> None:
    shape = model_shape(num_heads=2, kv_heads=2, head_dim=16, scale=1.0, windows=[None] * 4)
    pool = KVPool(shape, 4096, 16, torch.float32, torch.device("cpu"))
    pool.runs[0].fill_(1.0)
    size, before = pool.runs[0].nbytes, rss_bytes()
    assert size > 50 << 20
    pool.drop()
    assert before - rss_bytes() > 0.9 * size
    pool.restore()
    assert not pool.runs[0].any()
    pool.runs[0][0, 5] = 2.0
    assert pool.rows[0].any()


def test_tensors_of_a_gpu_alone_are_moved() -> None:
    weight = torch.ones(3, 3, device="meta")
    assert len(list(storages([weight, torch.ones(2), torch.empty(0, device="meta")]))) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_are_restored_on_a_gpu(folder: Path) -> None:
    weight = torch.randn(1 << 20, device="cuda")
    view = weight[5:9]
    kept, held = weight.clone().cpu(), torch.cuda.memory_allocated()
    offloaded = OffloadedWeights([weight, view])
    assert held - torch.cuda.memory_allocated() >= 4 << 20
    offloaded.restore()
    assert torch.equal(weight.cpu(), kept) and torch.equal(view.cpu(), kept[5:9])


class Stub:
    def __init__(self) -> None:
        self.level, self.log, self.in_flight, self.adapters = 0, [], 0, None
        self.geometry = type("Geometry", (), {"num_blocks": 4})()
        self.block_hashes = type(
            "Names", (), {"blocks_and_hashes": lambda _: ([], b""), "host_blocks_and_hashes": lambda _: ([], b"")}
        )()

    def reset(self, num_slots: int) -> None:
        self.log.append("reset")

    def reset_prefix_cache(self) -> None:
        self.log.append("forget")

    def sleep(self, level: int) -> int:
        self.log.append(f"sleep {level}")
        self.level = level
        return 7

    def wake(self, parts: list[MemoryTag]) -> int:
        self.log.append("wake " + " ".join(parts))
        return 5


def test_the_loop_sleeps_for_its_scheduler_alone() -> None:
    links, runner = FakeLinks(Member("worker", Role.GPU_WORKER, 3, "ipc://w")), Stub()
    it = Worker(links, runner)
    it.session.handle(1, Attach(1, num_slots=4))
    it.session.handle(2, Sleep(2, 1))
    it.session.handle(1, Sleep(1, 2))
    it.session.handle(2, Wake(2, [MemoryTag.WEIGHTS]))
    it.session.handle(1, Wake(1, [MemoryTag.WEIGHTS]))
    it.session.handle(1, Attach(1, num_slots=4, forget=True))
    assert runner.log == ["reset", "sleep 2", "wake weights", "reset", "forget"]
    kinds = [type(frame) for _, frame in links.answered]
    assert kinds == [Attached, Fenced, Slept, Fenced, Slept, Attached]
    assert links.answered[2][1] == Slept(7) and links.answered[4][1] == Slept(5)
