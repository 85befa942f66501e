"""Copies of blocks in GPU memory: errors of the GPU, the order of reports, mappings and buffers. The GPU is fake."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeGpu
from kv_peers import RECEIVER, SMALL, Pair, Peer

from blockyard.services.kv_transfer import device_copier
from blockyard.services.kv_transfer.arena import DeviceArena, map_device_arena
from blockyard.services.kv_transfer.connectors.selection import make_copier
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.device_copier import MAX_STAGING, DeviceCopier
from blockyard.services.kv_transfer.host_copies import Checksums, Words
from blockyard.services.kv_transfer.protocol.events import Received, Sent
from blockyard.shared.config.services.process import BusConfig

ALL = range(SMALL.num_layers)


@pytest.fixture
def gpu_peers(fake_gpu: FakeGpu, bus: BusConfig) -> Iterator[tuple[Peer, Peer]]:
    source, target = Peer(bus, SMALL, 20, device="cpu"), Peer(bus, SMALL, 30, device="cpu")
    source.fill_random()
    yield source, target
    source.close()
    target.close()


def test_auto_takes_cuda_ipc_if_the_memory_opens_and_reads_back(
    fake_gpu: FakeGpu, gpu_peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connector() -> str:
        pair = Pair(*gpu_peers, "auto")
        pair.until(lambda: pair.sender.connector != "")
        taken = pair.sender.connector
        pair.close()
        return taken

    assert connector() == "cuda_ipc"
    with monkeypatch.context() as patch:
        patch.setattr(fake_gpu, "refuses", "invalid argument")
        assert connector() == "tcp"
    with monkeypatch.context() as patch:
        patch.setattr(gpu_peers[1].arena, "_nonce", bytes(16))
        assert connector() == "tcp"
    fake_gpu.handles.clear()
    stale = gpu_peers[1].arena.export(RECEIVER)
    fake_gpu.handles.clear()
    monkeypatch.setattr(gpu_peers[1].arena, "export", lambda me: stale)
    assert connector() == "tcp"
    assert fake_gpu.open == [], "nothing stays mapped"


@pytest.mark.parametrize(
    ("wanted", "devices", "words"),
    [
        ("cuda_ipc", ("cpu", "host"), "not on a GPU"),
        ("shm", ("host", "cpu"), "is on a GPU"),
        ("shm", ("cpu", "cpu"), "of this worker is on a GPU"),
        ("cuda_ipc", ("host", "host"), "of this worker is on a CPU"),
    ],
)
def test_connectors_that_do_not_fit_the_memory(
    fake_gpu: FakeGpu, bus: BusConfig, wanted: str, devices: tuple[str, str], words: str
) -> None:
    source, target = Peer(bus, SMALL, 20, device=devices[0]), Peer(bus, SMALL, 30, device=devices[1])
    pair = Pair(source, target, wanted)
    pair.until(lambda: bool(pair.sender.closed))
    assert f"KV connector {wanted}" in pair.sender.closed and words in pair.sender.closed
    pair.close()
    source.close()
    target.close()


@pytest.mark.parametrize("connector", ["cuda_ipc", "tcp"])
def test_an_error_of_the_gpu_fails_transfers_by_name(
    fake_gpu: FakeGpu, gpu_peers: tuple[Peer, Peer], connector: str
) -> None:
    pair = Pair(*gpu_peers, connector)
    pair.begin(1, [4, 5])
    pair.until(lambda: pair.sender.connector == connector)
    fake_gpu.computes.clear()
    pair.sender.write(1, [1], [4], ALL)
    pair.until(lambda: pair.sender.needs_polling)
    fake_gpu.error = "an illegal memory access was encountered"
    fake_gpu.computes.set()
    pair.begin(2, [6])
    pair.sender.write(2, [2], [6], ALL)
    pair.until(lambda: len(pair.sent) == len(pair.ended) == 2)
    for number in (1, 2):
        assert pair.sent[number].outcome is Sent.ABORTED and "illegal memory access" in pair.sent[number].detail
        assert pair.ended[number].outcome is Received.ABORTED and pair.ended[number].landed == []
    pair.close()


def test_a_kernel_that_the_receiver_cannot_launch_ends_the_transfer(
    gpu_peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    pair = Pair(*gpu_peers, "cuda_ipc")
    monkeypatch.setattr(device_copier, "block_checksums", fails)
    pair.begin(1, [4, 5])
    pair.sender.write(1, [1, 2], [4, 5], ALL)
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.REVOKED and "unspecified launch failure" in pair.ended[1].detail
    pair.close()


def test_a_copy_in_flight_keeps_the_mapping(
    fake_gpu: FakeGpu, gpu_peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copier, "copy_blocks", lambda *args, **options: None)  # the interpreter keeps arguments
    pair = Pair(*gpu_peers, "cuda_ipc")
    pair.begin(1, [4])
    fake_gpu.computes.clear()
    pair.sender.write(1, [1], [4], ALL)
    pair.until(lambda: pair.sender.needs_polling)
    pair.break_link()
    for _ in range(10):
        pair.turn()
    assert len(fake_gpu.open) == 1 and pair.sender.open_transfers() == {1: [1]}
    fake_gpu.computes.set()
    pair.until(lambda: 1 in pair.sent)
    assert pair.sent[1].outcome is Sent.LINK_LOST and fake_gpu.open == []
    pair.close()


def test_a_handle_of_memory_that_was_dropped(fake_gpu: FakeGpu) -> None:
    arena = DeviceArena(1000 * 8, torch.device("cpu"))
    old = arena.export(1)
    assert old is not None
    mapped = map_device_arena(old)
    view = arena.bytes[5:7]
    view.fill_(3)
    arena.drop()
    arena.restore()
    new = arena.export(1)
    assert new is not None and new.generation == 2 and new.nonce != old.nonce
    assert view.tolist() == [0, 0], "the view has the new memory"
    del mapped
    assert fake_gpu.open == []


def test_both_ends_are_polled_without_waiting_while_their_gpu_copies(
    fake_gpu: FakeGpu, gpu_peers: tuple[Peer, Peer]
) -> None:
    pair = Pair(*gpu_peers, "cuda_ipc")
    pair.begin(1, [4])
    fake_gpu.computes.clear()
    assert not pair.sender.needs_polling
    pair.sender.write(1, [1], [4], ALL)
    pair.until(lambda: pair.sender.needs_polling)
    assert not pair.receiver.needs_polling
    fake_gpu.computes.set()
    pair.until(lambda: pair.receiver.needs_polling)
    pair.until(lambda: 1 in pair.ended)
    assert not pair.sender.needs_polling and not pair.receiver.needs_polling
    pair.close()


@pytest.mark.parametrize("connector", ["cuda_ipc", "tcp"])
def test_memory_of_a_copy_is_allocated_on_its_stream(
    fake_gpu: FakeGpu, gpu_peers: tuple[Peer, Peer], connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise torch may return memory that a step in flight still uses, and the copy reads other ids."""
    pair, real, streams = Pair(*gpu_peers, connector), torch.empty, list[bool]()

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        if "device" in options:
            streams.append(fake_gpu.on_side_stream)
        return real(*args, **options)

    monkeypatch.setattr(device_copier.torch, "empty", empty)
    pair.begin(1, [4, 5])
    pair.sender.write(1, [1, 2], [4, 5], ALL)
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.LANDED and streams and all(streams)
    pair.close()


def test_received_bytes_wait_for_a_pinned_buffer(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    make_buffer, buffers = DeviceCopier.make_buffer, list[Words]()

    def made(copier: DeviceCopier, num_bytes: int) -> Words:
        buffers.append(make_buffer(copier, num_bytes))
        return buffers[-1]

    monkeypatch.setattr(DeviceCopier, "make_buffer", made)
    arena, thread = DeviceArena(40 * SMALL.block_bytes, torch.device("cpu")), CopyThread()
    blocks = make_copier(arena, SMALL, thread)
    rng, words = np.random.default_rng(0), SMALL.sections[0].piece_bytes // 8
    sent = rng.integers(0, 2**64, (12, SMALL.num_layers, 2, words), dtype=np.uint64)
    order: list[int] = []
    expected = [Checksums(SMALL.sections[0]).of_packed(packed, ALL) for packed in sent]

    def landed(number: int, sums: Words | None) -> None:
        assert sums is not None and (sums == expected[number]).all()
        order.append(number)

    def failed(error: Exception) -> None:
        raise error

    for i, packed in enumerate(sent):
        blocks.unpack(memoryview(packed.tobytes()), [2 * i, 39 - 2 * i], ALL, lambda sums, i=i: landed(i, sums), failed)
    assert len(buffers) == MAX_STAGING < 12
    blocks.drain()
    assert order == list(range(12)) and len(buffers) == MAX_STAGING
    memory = arena.bytes.numpy().view(np.uint64).reshape(SMALL.num_layers, 40, words)
    for i, packed in enumerate(sent):
        assert (memory[:, [2 * i, 39 - 2 * i]] == packed).all()
    thread.close()


def test_memory_that_is_not_whole_blocks(fake_gpu: FakeGpu) -> None:
    thread = CopyThread()
    with pytest.raises(ValueError, match="not whole blocks"):
        make_copier(DeviceArena(SMALL.block_bytes + 8, torch.device("cpu")), SMALL, thread)
    thread.close()
