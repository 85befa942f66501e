"""Staging memory: its limit, and what becomes of the buffers of links that have closed."""

import pytest
import torch

from blockyard.services.kv_transfer import staging
from blockyard.services.kv_transfer.arena import HostArena
from blockyard.services.kv_transfer.staging import HOST_BUFFER_BYTES, StagingMemory, planned_bytes
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.errors import ConfigError

MIB = 1 << 20
CPU = torch.device("cpu")


def test_buffers_lie_side_by_side() -> None:
    memory = StagingMemory(CPU)
    buffers = memory.take(3, 100)
    assert len(buffers) == 3 and buffers.num_bytes == HOST_BUFFER_BYTES
    start = buffers.arena.bytes.data_ptr()
    assert [buffers[i].data_ptr() - start for i in range(3)] == [0, HOST_BUFFER_BYTES, 2 * HOST_BUFFER_BYTES]


def test_links_get_smaller_buffers_once_little_is_left_and_in_the_end_none() -> None:
    memory, taken = StagingMemory(CPU, 64 * MIB), []
    with pytest.raises(ConfigError, match="of 64 MiB of staging memory are in use"):
        while True:
            taken.append(memory.take(4, 100))
    sizes = [buffers.num_bytes // MIB for buffers in taken]
    assert sizes == [4, 4, 4, 2, 1, 1] and 4 * sum(sizes) == 64
    memory.give_back(taken.pop(3))
    assert memory.take(4, 100).num_bytes == MIB, "half of what is left"


def test_a_buffer_holds_a_piece_however_large_that_is() -> None:
    memory = StagingMemory(CPU, 64 * MIB)
    large = memory.take(3, 10 * MIB + 1)
    assert large.num_bytes == 10 * MIB + 8
    with pytest.raises(ConfigError, match="a new link needs 60"):
        memory.take(3, 20 * MIB)


def test_buffers_of_a_gpu_are_kept_for_the_next_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """To free memory of a GPU may take as long as the steps in flight."""
    monkeypatch.setattr(StagingMemory, "_allocate", lambda self, num_bytes: HostArena(num_bytes))
    monkeypatch.setattr(staging, "GPU_BUFFER_BYTES", MIB)
    memory = StagingMemory(torch.device("cuda"), 8 * MIB)
    buffers = memory.take(3, 100)
    memory.give_back(buffers)
    assert memory.take(2, 100) is not buffers, "of another number"
    assert memory.take(3, 100) is buffers
    memory.give_back(buffers)
    large = memory.take(4, 100)
    assert large.num_bytes == MIB, "makes room"
    memory.give_back(large)
    memory.close()
    with pytest.raises(ConfigError, match="2 of 8 MiB"):
        memory.take(7, 100)


def test_memory_that_is_not_free_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> HostArena:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory = StagingMemory(CPU)
    monkeypatch.setattr(staging, "make_arena", fails)
    with pytest.raises(ConfigError, match="no 12 MiB for staging buffers"):
        memory.take(3, 100)
    monkeypatch.undo()
    assert memory.take(3, 100).num_bytes == HOST_BUFFER_BYTES


@pytest.mark.parametrize(
    ("connector", "device", "mib"), [("nixl", "cuda", 1024), ("nixl", "cpu", 0), ("auto", "cuda", 0)]
)
def test_the_memory_plan_of_a_worker(connector: str, device: str, mib: int) -> None:
    config = KVTransferConfig(connector=connector)
    assert planned_bytes(torch.device(device), config) == mib * MIB
    assert planned_bytes(torch.device(device), None) == 0
