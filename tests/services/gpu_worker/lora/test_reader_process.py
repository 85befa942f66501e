"""The process that reads adapters: what it answers, and what its death changes."""

import contextlib
import fcntl
import gc
import json
import os
import shutil
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import Batch, adapt, load_adapters, save_adapter
from safetensors.torch import save_file
from tiny_models import BY_NAME, settings, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.child_processes import job_deadlines
from blockyard.services.gpu_worker.lora import reader_client
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules, read_modules
from blockyard.services.gpu_worker.lora.reader_client import (
    LATE,
    MOST_CPU_S,
    MOST_DEATHS,
    MOST_S,
    NotRead,
    ReaderProcess,
)
from blockyard.services.gpu_worker.lora.reader_frames import ArrivingModules, FolderRead, ModulesRead, ReadFolder
from blockyard.services.gpu_worker.lora.reader_process import MODULES_A_FRAME, answer
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.messages import AdapterPlaced

LIMITS = AdapterLimits(dtype=torch.float32, max_rank=32)
LORA = LoraConfig(max_loras=1, max_cpu_loras=2, with_bias=True)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `base` and `adapter`."""
    made = tmp_path_factory.mktemp("folder")
    theirs = BY_NAME["llama"].save(made / "base")
    fields = {"target_modules": "all-linear", "trainable_token_indices": [7, 3], "bias": "lora_only"}
    save_adapter(theirs, made / "adapter", **fields)
    return made


@pytest.fixture(scope="module")
def reader() -> Iterator[ReaderProcess]:
    made = ReaderProcess(LIMITS)
    yield made
    made.close()


def answers(reader: ReaderProcess, *jobs: int) -> dict[int, object]:
    found, end_s = dict[int, object](), time.monotonic() + WAIT_S
    while set(found) < set(jobs):
        found.update(reader.receive())
        assert time.monotonic() < end_s, found
        time.sleep(0.002)
    return found


def test_the_same_as_when_read_here(reader: ReaderProcess, folder: Path) -> None:
    reader.ask(1, str(folder / "adapter"))
    got, want = answers(reader, 1)[1], read_modules(folder / "adapter", LIMITS)
    assert isinstance(got, ReadModules) and got.config == want.config and got.digest == want.digest
    mine, theirs = ({one.name: one for one in read.modules} for read in (got, want))
    assert set(mine) == set(theirs)
    for name, module in mine.items():
        assert (module.scale, module.is_stack) == (theirs[name].scale, theirs[name].is_stack)
        for (field, a), (other, b) in zip(module.tensors(), theirs[name].tensors(), strict=True):
            assert field == other and torch.equal(a, b) and a.dtype == b.dtype
    reader.ask(2, str(folder / "nowhere"))  # answered behind the news that the memory is mapped
    assert "is no folder" in str(answers(reader, 2)[2])
    open_files = [os.readlink(one) for one in Path(f"/proc/{reader.process_id}/fd").iterdir()]
    assert len(open_files) > 3 and not any("adapter" in one for one in open_files)


def test_a_broken_adapter_is_refused_and_the_next_is_read(reader: ReaderProcess, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "adapter", tmp_path / "nan")
    save_file({"x.lora_A.weight": torch.full((2, 2), float("nan"))}, tmp_path / "nan" / "adapter_model.safetensors")
    reader.ask(11, str(tmp_path / "nan"))
    reader.ask(12, str(folder / "adapter"))
    found = answers(reader, 11, 12)
    assert "not finite" in str(found[11]) and not isinstance(found[12], NotRead)


def test_what_a_killed_process_was_asked_for_is_asked_again(reader: ReaderProcess, folder: Path) -> None:
    before = reader.process_id
    os.kill(before, signal.SIGSTOP)
    for job in (21, 22):
        reader.ask(job, str(folder / "adapter"))
    os.kill(before, signal.SIGKILL)
    found = answers(reader, 21, 22)
    assert not any(isinstance(one, NotRead) for one in found.values()) and reader.process_id != before


def test_an_adapter_that_ends_its_reader_is_refused(folder: Path) -> None:
    reader = ReaderProcess(LIMITS)
    reader.ask(1, str(folder / "adapter"))
    for _ in range(MOST_DEATHS):
        os.kill(reader.process_id, signal.SIGKILL)
        before, found, end_s = reader.process_id, list[tuple[int, object]](), time.monotonic() + WAIT_S
        while reader.process_id == before and time.monotonic() < end_s:
            found += reader.receive()
            time.sleep(0.002)
    assert [job for job, _ in found] == [1] and "has ended 3 times" in str(found[0][1])
    reader.close()


def test_several_folders_are_read_at_a_time_until_one_ends_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then one at a time, so that the folder that ends it is refused and no other."""
    monkeypatch.setattr(reader_client, "reader_threads", lambda: 3)
    reader = ReaderProcess(LIMITS)
    for job in range(1, 9):
        reader.ask(job, str(folder / "adapter"))
    found = answers(reader, *range(1, 9))
    assert len({one.digest for one in found.values() if isinstance(one, ReadModules)}) == 1
    tasks = Path(f"/proc/{reader.process_id}/task")
    before = len(list(tasks.iterdir()))
    os.kill(reader.process_id, signal.SIGKILL)
    reader.ask(9, str(folder / "adapter"))
    assert isinstance(answers(reader, 9)[9], ReadModules)
    assert len(list(Path(f"/proc/{reader.process_id}/task").iterdir())) == before - 2
    reader.close()


def test_weights_that_are_rewritten_in_place_while_they_are_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both versions are whole files of equal size."""
    write_many(tmp_path / "made", 400)
    file, read, count = tmp_path / "made" / "adapter_model.safetensors", os.preadv, 0
    before = file.read_bytes()
    os.utime(file, ns=(0, 0))

    def rewrite_and_read(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count == 2:  # behind the header
            file.write_bytes(before[:-4] + before[-8:-4])
        return read(*arguments)

    limits, asked = AdapterLimits(dtype=torch.float32), ReadFolder(1, str(tmp_path / "made"))
    monkeypatch.setattr(os, "preadv", rewrite_and_read)
    [whole, *_] = answer(asked, limits)
    assert isinstance(whole, FolderRead) and count == 4
    assert whole.digest == read_modules(tmp_path / "made", limits).digest


def slow_to_match(folder: Path, to: Path) -> str:
    shutil.copytree(folder / "adapter", to)
    config = json.loads((to / "adapter_config.json").read_text())
    config |= {"target_modules": "(([a-z0-9_.])*)*!"}
    (to / "adapter_config.json").write_text(json.dumps(config))
    return str(to)


def test_an_adapter_whose_patterns_are_matched_for_ever_is_refused_and_delays_no_other(
    reader: ReaderProcess, folder: Path, tmp_path: Path
) -> None:
    before = reader.process_id
    reader.ask(31, slow_to_match(folder, tmp_path / "slow"))
    reader.ask(32, str(folder / "adapter"))
    found = answers(reader, 31, 32)
    assert "target_modules '(([a-z0-9_.])*)*!': the names of the adapter's modules cannot be" in str(found[31])
    assert isinstance(found[32], ReadModules) and reader.process_id == before


def test_an_adapter_that_takes_too_much_cpu_time_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends the process, which reads one at a time then, and then ends that one."""
    monkeypatch.setattr(reader_client, "reader_threads", lambda: 2)
    reader = ReaderProcess(LIMITS)
    for process in (reader.process_id, None):
        if process is not None:
            os.kill(process, signal.SIGSTOP)
            reader.ask(1, str(folder / "adapter"))
        os.kill(before := reader.process_id, signal.SIGXCPU)
        os.kill(before, signal.SIGCONT)
        found, end_s = list[tuple[int, object]](), time.monotonic() + WAIT_S
        while reader.process_id == before and time.monotonic() < end_s:
            found += reader.receive()
            time.sleep(0.002)
    assert found + reader.receive() == [(1, NotRead(f"it cannot be read in {MOST_CPU_S} s of CPU time"))]
    reader.close()


def write_many(folder: Path, num_modules: int) -> None:
    """Writes an adapter of small matrices."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "target_modules": ["q"]}')
    names = [f"base_model.model.{i:04}.q.lora_{part}.weight" for i in range(num_modules) for part in "AB"]
    save_file(
        {name: torch.full((1, 1), float(i)) for i, name in enumerate(names)}, folder / "adapter_model.safetensors"
    )


def test_many_modules_are_taken_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched between two calls, also if the process ends in the middle."""
    monkeypatch.setattr(reader_client, "RECEIVE_S", 0.0)  # a frame in each call
    write_many(tmp_path / "many", num := 2 * MODULES_A_FRAME + 1)
    taken: list[int] = []

    class Counted(ArrivingModules):
        def add(self, frame: ModulesRead) -> None:
            taken.append(len(frame.modules))
            super().add(frame)

    monkeypatch.setattr(reader_client, "ArrivingModules", Counted)
    reader, found, end_s = ReaderProcess(LIMITS), list[tuple[int, object]](), time.monotonic() + WAIT_S
    reader.ask(1, str(tmp_path / "many"))
    while not found and time.monotonic() < end_s:
        before = len(taken)
        found = list(reader.receive())
        assert len(taken) <= before + 1
        if len(taken) == 1 and before == 0:
            os.kill(reader.process_id, signal.SIGKILL)
    [(_, read)] = found
    assert isinstance(read, ReadModules)
    assert [module.name for module in read.modules] == [f"{i:04}.q" for i in range(num)]
    assert [float(module.a) for module in read.modules if module.a is not None] == [2.0 * i for i in range(num)]
    assert taken[-3:] == [MODULES_A_FRAME, MODULES_A_FRAME, 1]
    reader.close()


class Clock:
    """Of the limits of time, which the test turns."""

    now_s = 100.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(job_deadlines, "AwakeClock", lambda longest_s: made)
    return made


@contextlib.contextmanager
def hanging(file: Path) -> Iterator[None]:
    """Who opens the file inside the block hangs, as on a disk that does not answer: a lease is to be given up first."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # asks for that
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)


def test_a_folder_on_a_disk_that_hangs_is_refused_and_delays_no_other(
    folder: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_client, "reader_threads", lambda: 1)
    shutil.copytree(folder / "adapter", tmp_path / "hung")
    reader = ReaderProcess(LIMITS)
    reader.ask(1, str(folder / "adapter"))
    answers(reader, 1)
    before = reader.process_id
    with hanging(tmp_path / "hung" / "adapter_model.safetensors"):
        reader.ask(2, str(tmp_path / "hung"))
        reader.ask(3, str(folder / "adapter"))
        assert isinstance(answers(reader, 3)[3], ReadModules), "before the other one is given up"
        assert reader.process_id == before
        clock.now_s += MOST_S + 1.0
        refused = answers(reader, 2)[2]
        assert isinstance(refused, NotRead) and refused.status == LATE and "its disk is slow, or hangs" in refused.cause
        assert reader.process_id != before
        reader.ask(4, str(folder / "adapter"))
        assert isinstance(answers(reader, 4)[4], ReadModules), "by another process"
    reader.ask(5, str(tmp_path / "hung"))
    assert isinstance(answers(reader, 5)[5], ReadModules), "the disk answers again"
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    reader.close()


def test_a_reader_that_says_nothing_is_replaced(folder: Path, clock: Clock) -> None:
    reader = ReaderProcess(LIMITS)
    reader.ask(1, str(folder / "adapter"))
    answers(reader, 1)
    before = reader.process_id
    os.kill(before, signal.SIGSTOP)
    reader.ask(2, str(folder / "adapter"))
    assert not reader.receive() and reader.process_id == before
    clock.now_s += MOST_S
    assert not reader.receive() and reader.process_id != before
    assert isinstance(answers(reader, 2)[2], ReadModules)
    reader.close()


def with_process(folder: Path) -> tuple[Runner, int]:
    """With the id of the process that reads adapters."""
    config, process_ids = settings(folder / "base", lora=LORA), list[int]()

    def start_reader(*arguments: Any) -> ReaderProcess:
        reader = ReaderProcess(*arguments)
        process_ids.append(reader.process_id)
        return reader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "ReaderProcess", start_reader)
        runner = engine.start(config, lambda phase, progress, notes: None)
    assert isinstance(runner, Runner)
    runner.reset(8)
    [process_id] = process_ids
    return runner, process_id


def test_steps_go_on_while_an_adapter_is_read_and_its_reader_killed(folder: Path) -> None:
    (runner, process_id), here = with_process(folder), start(folder / "base", lora=LORA)
    here.reset(8)
    want = Batch(here, [None], []).run(30)
    assert runner.adapters is not None and runner.adapters.lora is not None
    runner.adapters.load(1, str(folder / "adapter"))
    os.kill(process_id, signal.SIGKILL)
    assert Batch(runner, [None], []).run(30) == want
    runner.adapters.reset()
    for one in (runner, here):
        one.reset(8)
        load_adapters(one, [folder / "adapter"])
    placed = [AdapterPlaced(0, 1)]
    assert Batch(runner, [0], placed).run(4) == Batch(here, [0], placed).run(4)


def test_a_runner_that_is_dropped_leaves_neither_its_model_nor_the_process(folder: Path) -> None:
    """A worker that sleeps deeply drops its runner, and the memory has to be free."""
    runner, process_id = with_process(folder)
    load_adapters(runner, [folder / "adapter"])
    adapt(runner, folder / "adapter")
    held = weakref.ref(runner.model)
    del runner
    gc.collect()
    assert held() is None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
