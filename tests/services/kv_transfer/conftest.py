"""Two workers' ends of KV transfers, for the tests of links."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_peers import SMALL, Pair, Peer

from blockyard.shared.config.services.process import BusConfig


@pytest.fixture
def bus(tmp_path: Path) -> BusConfig:
    return BusConfig(registry="ipc:///unused", bind=f"ipc://{tmp_path}")


@pytest.fixture
def peers(bus: BusConfig) -> Iterator[tuple[Peer, Peer]]:
    """Source and target, of different sizes."""
    source, target = Peer(bus, SMALL, 20), Peer(bus, SMALL, 30)
    source.fill_random()
    yield source, target
    source.close()
    target.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, peers: tuple[Peer, Peer]) -> Iterator[Pair]:
    it = Pair(*peers, request.param)
    yield it
    it.close()
