"""Two workers' ends of KV transfers, for the tests of links."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # set before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.use()

import fake_cuda
from kv_peers import MIXED, SMALL, Pair, Peer, ipc_bus, needs_nixl

from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart
from blockyard.shared.config.services.process import BusConfig

GPU = torch.cuda.is_available()


@pytest.fixture
def bus(tmp_path: Path) -> BusConfig:
    return ipc_bus(tmp_path)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeGpu:
    if GPU:
        pytest.skip("Triton does not interpret its kernels where a GPU is")
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def peers(bus: BusConfig) -> Iterator[tuple[Peer, Peer]]:
    """Source and target, of different sizes."""
    yield from peers_on(bus, "host", "host")


WAYS = ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)]
WAYS += ["cuda_ipc", "tcp of GPUs", "tcp to a GPU", "tcp from a GPU", pytest.param("nixl of GPUs", marks=needs_nixl)]


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, bus: BusConfig) -> Iterator[Pair]:
    """Peers with every connector; GPUs are fake where there is none. CUDA IPC needs two processes: see `test_kills`."""
    yield from pair_of(request, bus, SMALL)


@pytest.fixture(params=WAYS)
def mixed_pair(request: pytest.FixtureRequest, bus: BusConfig) -> Iterator[Pair]:
    """A pair with layers that differ in what they keep."""
    yield from pair_of(request, bus, MIXED)


@pytest.fixture(params=WAYS)
def rank_pair(request: pytest.FixtureRequest, bus: BusConfig) -> Iterator[Pair]:
    """A rank with the second of two heads, and one that has both, with layers that differ in what they keep."""
    second = LayoutPart(0, MIXED.num_layers, ((1, 2), (0, 1), (1, 2)))
    yield from pair_of(request, bus, MIXED.of(second), MIXED, second)


def pair_of(
    request: pytest.FixtureRequest,
    bus: BusConfig,
    layout: BlockLayout,
    theirs: BlockLayout | None = None,
    part: LayoutPart | None = None,
) -> Iterator[Pair]:
    """theirs: the target's layout, part: that goes over the link; None: all of `layout`."""
    connector, device = request.param.split()[0], "cuda" if GPU else "cpu"
    devices = {"tcp to a GPU": ("host", device), "tcp from a GPU": (device, "host")}
    both = ("host", "host") if request.param in ("shm", "tcp", "nixl") else (device, device)
    if connector == "cuda_ipc" and GPU:
        pytest.skip("CUDA IPC needs two processes")
    if device in both and not GPU:
        fake_cuda.install(request.getfixturevalue("monkeypatch"))
    for peers in peers_on(bus, *devices.get(request.param, both), layout=layout, theirs=theirs):
        it = Pair(*peers, connector, part)
        yield it
        it.close()


def peers_on(
    bus: BusConfig, *devices: str, layout: BlockLayout = SMALL, theirs: BlockLayout | None = None
) -> Iterator[tuple[Peer, Peer]]:
    source, target = Peer(bus, layout, 20, device=devices[0]), Peer(bus, theirs or layout, 30, device=devices[1])
    source.fill_random()
    yield source, target
    source.close()
    target.close()
