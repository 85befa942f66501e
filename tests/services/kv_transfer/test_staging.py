"""Staging memory: its limit, and what becomes of the buffers of links that have closed."""

from dataclasses import replace

import pytest
import torch

from blockyard.services.kv_transfer.arena import GPU_STAGING, HOST_STAGING, HostArena
from blockyard.services.kv_transfer.staging import StagingMemory, planned_bytes
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.errors import ConfigError

MIB = 1 << 20
HOST_BUFFER_BYTES = HOST_STAGING.buffer_bytes
KV_MEMORY = HostArena(MIB)


def test_buffers_lie_side_by_side() -> None:
    memory = StagingMemory(KV_MEMORY)
    buffers = memory.take(3, 100)
    assert len(buffers) == 3 and buffers.num_bytes == HOST_BUFFER_BYTES
    start = buffers.arena.bytes.data_ptr()
    assert [buffers[i].data_ptr() - start for i in range(3)] == [0, HOST_BUFFER_BYTES, 2 * HOST_BUFFER_BYTES]


def test_links_get_smaller_buffers_once_little_is_left_and_in_the_end_none() -> None:
    memory, taken = StagingMemory(KV_MEMORY, 64 * MIB), []
    with pytest.raises(ConfigError, match="of 64 MiB of staging memory are in use"):
        while True:
            taken.append(memory.take(4, 100))
    sizes = [buffers.num_bytes // MIB for buffers in taken]
    assert sizes == [4, 4, 4, 2, 1, 1] and 4 * sum(sizes) == 64
    memory.give_back(taken.pop(3))
    assert memory.take(4, 100).num_bytes == MIB, "half of what is left"


def test_a_buffer_holds_a_piece_however_large_that_is() -> None:
    memory = StagingMemory(KV_MEMORY, 64 * MIB)
    large = memory.take(3, 10 * MIB + 1)
    assert large.num_bytes == 10 * MIB + 8
    with pytest.raises(ConfigError, match="a new link needs 60"):
        memory.take(3, 20 * MIB)


def test_buffers_of_a_gpu_are_kept_for_the_next_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """To free memory of a GPU may take as long as the steps in flight."""
    monkeypatch.setattr(HostArena, "staging", replace(GPU_STAGING, buffer_bytes=MIB))
    memory = StagingMemory(HostArena(MIB), 8 * MIB)
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

    monkeypatch.setattr(HostArena, "allocate_beside", fails)
    memory = StagingMemory(KV_MEMORY)
    with pytest.raises(ConfigError, match="no 12 MiB for staging buffers"):
        memory.take(3, 100)
    monkeypatch.undo()
    memory = StagingMemory(KV_MEMORY)
    assert memory.take(3, 100).num_bytes == HOST_BUFFER_BYTES


@pytest.mark.parametrize(("connector", "mib"), [("nixl", 1024), ("auto", 0)])
def test_the_memory_plan_of_a_worker_on_a_gpu(connector: str, mib: int) -> None:
    assert planned_bytes(KVTransferConfig(connector=connector)) == mib * MIB
    assert planned_bytes(None) == 0
