"""Adapters of a form that is known: they are packed as if each of their matrices had been looked at."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft_adapters import save_adapter
from placed_adapters import EXACT, KERNELS, finished, read_adapter
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.lora.device import packed_adapter, packed_form
from blockyard.services.gpu_worker.lora.device.device_places import DevicePlaces
from blockyard.services.gpu_worker.lora.device.packed_form import PackedPiece, find_form
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.read_modules import ReadModules
from blockyard.services.gpu_worker.lora.reader_client import ReaderProcess
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.shared.messages import AdapterPlaced

LIMITS = replace(EXACT, max_rank=16)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base, and three adapters of one form."""
    made = tmp_path_factory.mktemp("folders")
    theirs = BY_NAME["llama"].save(made / "base")
    fields = {"target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"], "r": 6, "rank_pattern": {"k_proj": 3}}
    for seed in range(1, 4):
        save_adapter(theirs, made / f"{seed}", seed, lora_alpha=4 * seed, **fields)
    return [made / "base", *(made / f"{seed}" for seed in range(1, 4))]


@pytest.fixture
def reader() -> Iterator[ReaderProcess]:
    made = ReaderProcess(LIMITS)
    yield made
    made.close()


class KeptPlaces:
    """Keeps what is put into places."""

    def __init__(self, places: DevicePlaces) -> None:
        self.num_places, self.size_bytes, self.prepare = places.num_places, places.size_bytes, places.prepare
        self.by_place: dict[int, HostAdapter] = {}

    def put(self, place: int, adapter: HostAdapter) -> None:
        self.by_place[place] = adapter


def load(adapters: WorkerAdapters, number: int, folder: Path) -> None:
    """Loads it, and puts it into the place of its number."""
    adapters.load(number, str(folder))
    end_s = time.monotonic() + WAIT_S
    while not (done := adapters.poll()):
        assert time.monotonic() < end_s
        time.sleep(0.002)
    assert not done[0].error
    adapters.place([AdapterPlaced(number, number)])


def num_memories(reader: ReaderProcess) -> int:
    """Of the process, which may have several descriptors of each."""
    found = set[int]()
    for one in Path(f"/proc/{reader.process_id}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:adapter" in os.readlink(one):
                found.add(one.stat().st_ino)
    return len(found)


def wait_for(reader: ReaderProcess, count: int) -> None:
    end_s = time.monotonic() + WAIT_S
    while num_memories(reader) != count:
        assert not reader.receive() and time.monotonic() < end_s, f"{num_memories(reader)} instead of {count}"
        time.sleep(0.002)


def test_the_same_as_one_that_was_arranged(
    folders: list[Path], reader: ReaderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of q and k are in another order, some matrices lie in two buffers, and memory is read into again."""
    monkeypatch.setattr(packed_adapter, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(packed_form, "PART_BYTES", 4000)
    monkeypatch.setattr(packed_form, "MOST_TARGETS", 3)
    model = start(folders[0]).model
    targets = ModelTargets(model)
    places = KeptPlaces(DevicePlaces(model, 2, LIMITS, KERNELS, torch.device("cpu"), SameMemory()))
    wanted = [finished(places.prepare(read_adapter(folder, targets, LIMITS))) for folder in folders[1:]]
    adapters = WorkerAdapters(targets, places, LIMITS, reader)
    load(adapters, 1, folders[1])
    wait_for(reader, 0)
    monkeypatch.delattr(ModelTargets, "arrange")
    for number in (2, 3, 1):
        load(adapters, number, folders[number])
        got, want = places.by_place[number], wanted[number - 1]
        assert got.digest == want.digest and want.packed is not None and got.packed is not None
        for mine, theirs in zip(got.packed.chunks, want.packed.chunks, strict=True):
            assert mine.first == theirs.first and torch.equal(mine.values, theirs.values)
        assert torch.equal(got.packed.offsets, want.packed.offsets)
        assert torch.equal(got.packed.ranks, want.packed.ranks)
        wait_for(reader, 1)


def test_memory_of_an_adapter_that_is_not_wanted_any_more_is_given_back(
    folders: list[Path], reader: ReaderProcess
) -> None:
    def read(job: int) -> ReadModules:
        reader.ask(job, str(folders[1]))
        end_s = time.monotonic() + WAIT_S
        while not (found := reader.receive()):
            assert time.monotonic() < end_s
            time.sleep(0.002)
        assert isinstance(found[0][1], ReadModules)
        return found[0][1]

    form = read(1).form
    reader.know(form)
    one = read(2)
    assert one.form == form and not one.modules and one.memory is not None
    wait_for(reader, 1)
    del one
    wait_for(reader, 0)


def test_matrices_that_are_elsewhere_have_no_form() -> None:
    piece = PackedPiece(torch.zeros(8), None, 0)
    memory = FileMemory()
    memory.map()
    assert find_form([[(0, [piece])]], memory) is None
