"""Copies that are lost, late or damaged on purpose: the links find each of them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_peers import MIXED, RECEIVER, SENDER, Pair, Peer, needs_nixl

from blockyard.services.kv_transfer.layout import LinkLayouts
from blockyard.services.kv_transfer.protocol.events import Received, Sent
from blockyard.services.kv_transfer.receiver import TransferReceiver
from blockyard.services.kv_transfer.sender_link import SenderLink
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import KVTransferConfig, KVTransferFaults

ALL = range(MIXED.num_layers)


@pytest.fixture(params=["shm", "tcp", pytest.param("nixl", marks=needs_nixl)])
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class FaultyPair(Pair):
    def __init__(self, source: Peer, target: Peer, connector: str, faults: KVTransferFaults) -> None:
        super().__init__(source, target, connector)
        self.close()
        end = (target.sockets, RECEIVER, MIXED, target.arena, target.copies)
        config = KVTransferConfig(connector=connector, faults=faults)
        self.receiver = TransferReceiver(*end, config=config)
        own = (SENDER, LinkLayouts(MIXED), source.arena, source.copies)
        self.sender = SenderLink(source.sockets, self.receiver.endpoint, RECEIVER, *own, config)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    bus = BusConfig(registry="ipc:///unused", bind=f"ipc://{tmp_path}")
    source, target = Peer(bus, MIXED, 20), Peer(bus, MIXED, 30)
    source.fill_random()
    yield source, target
    source.close()
    target.close()


def test_a_lost_copy_aborts_its_transfer(peers: tuple[Peer, Peer], connector: str) -> None:
    pair = FaultyPair(*peers, connector, KVTransferFaults(drop=1.0))
    pair.begin(1, [4, 5])
    pair.sender.write(1, [1, 2], [4, 5], ALL)
    pair.until(lambda: 1 in pair.sent and 1 in pair.ended)
    assert (pair.sent[1].outcome, pair.ended[1].outcome) == (Sent.ABORTED, Received.ABORTED)
    assert "--pd-faults" in pair.sent[1].detail and not any(section.any() for section in pair.target.sections)
    pair.close()


def test_a_flipped_bit_is_found_by_the_checksum_of_its_block(peers: tuple[Peer, Peer], connector: str) -> None:
    pair = FaultyPair(*peers, connector, KVTransferFaults(flip=1.0))
    pair.begin(1, [4, 5, 6])
    pair.sender.write(1, [1, 2, 3], [4, 5, 6], ALL)
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.CORRUPT
    corrupt = pair.ended[1].corrupt
    assert sorted(pair.ended[1].landed) == [position for position in range(3) if position not in corrupt]
    wrong: list[int] = []  # blocks with a wrong bit: each copy is of one section
    for sent, arrived in zip(pair.source.sections, pair.target.sections, strict=True):
        differ = arrived[:, 4:7] ^ sent[:, 1:4]
        assert np.unpackbits(differ.view(np.uint8)).sum() == 1
        wrong.extend(np.flatnonzero(differ.any((0, 2))).tolist())
    assert sorted(set(wrong)) == sorted(corrupt)
    pair.close()


def test_late_copies_land_in_the_end(peers: tuple[Peer, Peer], connector: str) -> None:
    pair = FaultyPair(*peers, connector, KVTransferFaults(delay_ms=20.0))
    for number in range(5):
        pair.begin(number, [number])
        pair.sender.write(number, [number], [number], ALL)
    pair.until(lambda: pair.sender.busy or bool(pair.ended))  # no descriptor tells when the delay is over
    pair.until(lambda: len(pair.ended) == len(pair.sent) == 5)
    for sent, arrived in zip(pair.source.sections, pair.target.sections, strict=True):
        assert (arrived[:, :5] == sent[:, :5]).all()
    pair.close()
