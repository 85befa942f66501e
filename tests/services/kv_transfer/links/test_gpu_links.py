"""Transfers between two processes with memory on a GPU. One GPU is enough: CUDA IPC works between processes on it."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from kv_peers import LARGE, Peer, needs_nixl, process

from blockyard.services.kv_transfer.arena import DeviceArena, map_device_arena
from blockyard.services.kv_transfer.device.ipc_memory import cuda_driver
from blockyard.services.kv_transfer.protocol.events import SenderEnded, Sent
from blockyard.services.kv_transfer.sender_link import SenderLink
from blockyard.shared.config.services.process import BusConfig

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NUM_BLOCKS = 64  # 32 MiB
SOURCES = [5, 6, 7, 40, 3, 63, 0, 20]
TARGETS = [9, 30, 31, 2, 63, 0, 11, 12]


@pytest.fixture
def peer(bus: BusConfig) -> Iterator[Peer]:
    it = Peer(bus, LARGE, NUM_BLOCKS, device="cuda")
    it.fill_random()
    yield it
    it.close()


def poll_until(link: SenderLink, condition: Callable[[], bool], timeout_s: float = 60.0) -> list[SenderEnded]:
    ended: list[SenderEnded] = []
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, link.closed
        ended += link.poll()
        time.sleep(0.0005)
    return ended


@pytest.mark.parametrize(
    ("connector", "there", "taken"),
    [
        ("auto", "cuda", "cuda_ipc"),
        ("cuda_ipc", "cuda", "cuda_ipc"),
        ("tcp", "cuda", "tcp"),
        ("auto", "host", "tcp"),
        pytest.param("nixl", "cuda", "nixl", marks=needs_nixl),
    ],
)
def test_another_process_gets_the_blocks(bus: BusConfig, peer: Peer, connector: str, there: str, taken: str) -> None:
    settings = {"bind": bus.bind, "num_blocks": NUM_BLOCKS, "device": there, "blocks": TARGETS}
    with process("receive", **settings) as receiver:
        link = peer.sender(receiver.wait("bound", 60), connector)
        link.begin(1, 1)
        link.write(1, SOURCES[:3], TARGETS[:3], range(2, LARGE.num_layers))
        link.write(1, SOURCES[3:], TARGETS[3:], range(LARGE.num_layers))
        link.write(1, SOURCES[:3], TARGETS[:3], range(2))
        poll_until(link, receiver.events.poll)
        outcome, landed, data = receiver.wait("ended")
        assert link.connector == taken and (outcome, sorted(landed)) == ("landed", list(range(len(TARGETS))))
        assert np.frombuffer(data, np.uint64).tobytes() == peer.blocks[:, SOURCES].tobytes()
        link.close()


def test_a_link_opens_and_blocks_leave_while_the_gpu_computes(bus: BusConfig, peer: Peer) -> None:
    settings = {"bind": bus.bind, "num_blocks": NUM_BLOCKS, "device": "cuda", "blocks": TARGETS}
    with process("receive", **settings) as receiver:
        endpoint = receiver.wait("bound", 60)
        x = torch.randn(8192, 8192, device="cuda")
        torch.cuda.synchronize()
        for _ in range(200):
            x = x @ x / 128
        computed = torch.cuda.Event()
        computed.record()
        link = peer.sender(endpoint, "cuda_ipc")
        link.begin(1, 1)
        poll_until(link, lambda: link.connector == "cuda_ipc")
        assert not computed.query(), "the link has not waited for the products"
        link.write(1, SOURCES, TARGETS, range(LARGE.num_layers))
        poll_until(link, lambda: link.open_transfers() == {})
        assert not computed.query(), "the copy has not waited for the products"
        poll_until(link, receiver.events.poll)
        assert receiver.wait("ended")[0] == "landed"
        link.close()


def test_memory_that_is_dropped_is_free_once_the_link_has_closed(bus: BusConfig, peer: Peer) -> None:
    num_blocks = 1024  # 512 MiB
    with process("receive", bind=bus.bind, num_blocks=num_blocks, device="cuda", blocks=[1]) as receiver:
        link = peer.sender(receiver.wait("bound", 60), "cuda_ipc")
        link.begin(1, 1)
        poll_until(link, lambda: link.connector == "cuda_ipc")
        held = torch.cuda.mem_get_info()[0]
        receiver.events.send("drop")
        receiver.wait("dropped")
        ended = poll_until(link, lambda: bool(link.closed))
        ended += link.poll()
        assert [event.outcome for event in ended] == [Sent.LINK_LOST]
        deadline = time.monotonic() + 10
        while torch.cuda.mem_get_info()[0] < held + num_blocks * LARGE.block_bytes * 0.9:
            assert time.monotonic() < deadline, "the memory is still mapped"
            time.sleep(0.01)
        link.close()


def test_an_arena_on_a_gpu() -> None:
    size = 32 << 20
    arena = DeviceArena(size, torch.device("cuda"))
    view = arena.bytes[5:9]
    assert not view.any()
    view.fill_(3)
    first = arena.export(7)
    assert first is not None and (first.num_bytes, first.incarnation, first.generation) == (size, 7, 1)
    with pytest.raises(OSError, match="cuIpcOpenMemHandle"):
        map_device_arena(first)  # CUDA does not let a process open its own memory
    held = torch.cuda.mem_get_info()[0]
    arena.drop()
    assert torch.cuda.mem_get_info()[0] - held >= size
    arena.restore()
    second = arena.export(7)
    assert arena.generation == 2 and view.tolist() == [0] * 4
    assert second is not None and second.nonce != first.nonce
    assert torch.equal(arena.bytes, torch.zeros_like(arena.bytes))


def test_an_arena_shares_its_allocation_with_no_tensor() -> None:
    """Also a small one, for which torch allocates 20 MiB, and one that would fit into memory that torch has cached."""
    big = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    first = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    del big
    arenas = [DeviceArena(size, torch.device("cuda")) for size in (3 << 20, 32 << 20)]
    rest = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (3 << 20, 16 << 20)]
    driver = cuda_driver()
    starts = [driver.start_of(it.data_ptr()) for it in (first, *rest)]
    for arena in arenas:
        assert arena.export(7) is not None and driver.start_of(arena.bytes.data_ptr()) not in starts
