"""A rank copies its share of a weight to the device, and ranks of a host read a file from disk once."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import BY_NAME
from torch.utils._python_dispatch import TorchDispatchMode

from blockyard.services.gpu_worker.loading import checkpoint, parallel_load
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.linear_spec import Cut
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard

CPU = torch.device("cpu")
MIB = 2**20


class CopiedBytes(TorchDispatchMode):
    """Counts bytes that are copied from buffers to the device."""

    def __init__(self, reader: parallel_load.Reader) -> None:
        super().__init__()
        self._buffers = {one.untyped_storage().data_ptr() for one in reader._buffers}
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() in self._buffers:
            self.total += args[1].nbytes
        return func(*args, **(kwargs or {}))


def empty_table(folder: Path, shard: Shard) -> WeightTable:
    config = read_config(folder)
    return find_family(config)(config, WeightTable(torch.float32, CPU, shard=shard)).table


@pytest.mark.parametrize("chunk_bytes", [100, 5000, MIB])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_rank_copies_its_share_and_no_more(tmp_path: Path, name: str, size: int, chunk_bytes: int) -> None:
    BY_NAME[name].save(tmp_path)
    files, copied = checkpoint.find_files(tmp_path, "auto", []), []
    for rank in range(size):
        expected, table = (empty_table(tmp_path, Shard(rank, size)) for _ in range(2))
        checkpoint.load(expected, tmp_path, "auto", [], 0, lambda _: None)
        reader = parallel_load.Reader(table, chunk_bytes)
        with parallel_load.opened(files) as fds, CopiedBytes(reader) as counted:
            for file, fd in zip(files, fds, strict=True):
                for stored in parallel_load.list_tensors(file, fd):
                    if table.wants(stored.name):
                        reader.load(stored, table)
        table.check_complete()
        for weight, place in expected.places.items():
            assert torch.equal(table.places[weight].target, place.target), (rank, weight)
        shares = sum(place.target.numel() for place in table.places.values()) * 4  # the checkpoints are in fp32
        assert counted.total == shares
        copied.append(counted.total)
    assert max(copied) < sum(place.target.nbytes for place in empty_table(tmp_path, WHOLE).places.values())


def disk_bytes() -> int:
    """Bytes that this process has made the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_ranks_of_a_host_read_a_file_from_disk_once(tmp_path: Path) -> None:
    """Both read every row of some weights, and other rows of the rest."""
    whole = {name: torch.rand(1024, 1024) for name in ("rows", "columns", "norm", "more_columns")}
    file = tmp_path / "model.safetensors"
    save_file(whole, file)
    tables = []
    for rank in range(2):
        own, table = range(512 * rank, 512 * (rank + 1)), WeightTable(torch.float32, CPU, shard=Shard(rank, 2))
        table.place("rows", torch.empty(512, 1024), (1024, 1024), cut=Cut(-2, (own,)))
        for name in ("columns", "more_columns"):
            table.place(name, torch.empty(1024, 512), (1024, 1024), cut=Cut(-1, (own,)))
        table.matrix("norm", 1024, 1024)
        tables.append(table)
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = disk_bytes()
        with ThreadPoolExecutor(2) as ranks:
            for _ in ranks.map(lambda table: parallel_load.load([file], table, lambda _: None), tables):
                pass
        found = disk_bytes() - before
    for table in tables:
        table.check_complete()
    assert torch.equal(torch.cat([table.places["columns"].target for table in tables], 1), whole["columns"])
    if not found:
        pytest.skip("the folder of tests is in memory: nothing is read from a disk")
    assert 0.9 * file.stat().st_size < found < 1.1 * file.stat().st_size
