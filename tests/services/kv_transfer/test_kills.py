"""Kill -9 of either side in mid-copy, with real processes: the survivor lives, and only whole blocks have landed."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_peers import (
    LARGE,
    RECEIVER,
    SENDER,
    Pair,
    Peer,
    killed_in_mid_copy,
    mapped_arenas,
    needs_nixl,
    process,
    small_copies_of_gpus,
)

from blockyard.services.kv_transfer.protocol.events import BlocksLanded, Received, ReceiverEnded, SenderEnded, Sent
from blockyard.services.kv_transfer.protocol.frames import Transfer
from blockyard.shared.config.services.process import BusConfig

NUM_BLOCKS = 128  # 64 MiB
FIRST_PART = 32  # blocks that have landed before the sender is killed
KILL_AFTER = 4  # copies

on_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# connector, and the memory of both sides
CONNECTORS = [
    ("shm", "host"),
    ("tcp", "host"),
    pytest.param(("nixl", "host"), marks=needs_nixl),
    pytest.param(("cuda_ipc", "cuda"), marks=on_gpu),
    pytest.param(("tcp", "cuda"), marks=on_gpu),
    pytest.param(("nixl", "cuda"), marks=[*on_gpu, needs_nixl]),
]


@pytest.fixture
def make_peer(bus: BusConfig) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(device: str = "host", num_blocks: int = NUM_BLOCKS) -> Peer:
        if device != "host":
            small_copies_of_gpus()
        peers.append(Peer(bus, LARGE, num_blocks, device=device))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def poll_until(step: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not step():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def arena_contents(seed: int = 0) -> np.ndarray:
    """What `Peer.fill_random` writes."""
    shape = (LARGE.num_layers, NUM_BLOCKS, LARGE.sections[0].piece_bytes // 8)
    return np.random.default_rng(seed).integers(0, 2**64, shape, dtype=np.uint64)


def works_again(source: Peer, target: Peer, connector: str) -> None:
    """A transfer between a survivor and another peer, with new links."""
    pair = Pair(source, target, "tcp" if connector == "cuda_ipc" else connector)  # CUDA IPC needs two processes
    transfer = pair.transfer(99, list(range(0, 20, 2)))
    pair.receiver.expect(transfer)
    pair.sender.begin(99, 1)
    pair.sender.write(99, list(range(10)), transfer.blocks, range(LARGE.num_layers))
    pair.until(lambda: 99 in pair.ended)
    assert pair.ended[99].outcome is Received.LANDED
    assert (target.blocks[:, 0:20:2] == source.blocks[:, :10]).all()
    pair.close()


@pytest.mark.parametrize("case", CONNECTORS, ids=" ".join)
def test_the_sender_is_killed(bus: BusConfig, make_peer: Callable[..., Peer], case: tuple[str, str]) -> None:
    connector, device = case
    peer = make_peer(device)
    receiver = peer.receiver()
    transfer = Transfer(1, SENDER, 1, RECEIVER, 1, list(range(NUM_BLOCKS)))
    receiver.expect(transfer)
    landed: list[int] = []
    ended: list[ReceiverEnded] = []

    def step() -> bool:
        for event in receiver.poll():
            if isinstance(event, BlocksLanded):
                landed.extend(event.positions)
            elif isinstance(event, ReceiverEnded):
                ended.append(event)
        return bool(ended) or len(landed) == FIRST_PART

    settings = {"bind": bus.bind, "num_blocks": NUM_BLOCKS, "endpoint": receiver.endpoint, "connector": connector}
    with process("send", **settings, device=device, first_part=FIRST_PART, kill_after=KILL_AFTER) as sender:
        poll_until(step)
        sender.events.send("go on")
        poll_until(lambda: step() and bool(ended))
        sender.process.join(10)
    assert (ended[0].outcome, ended[0].corrupt) == (Received.SENDER_LOST, [])
    assert FIRST_PART <= len(landed) < NUM_BLOCKS and sorted(landed) == ended[0].landed
    assert receiver.open_transfers() == []
    expected, after = arena_contents(), peer.blocks.copy()
    assert (after[:, landed] == expected[:, landed]).all()
    if connector != "tcp":
        assert (after != 0).any(2).all(0).sum() >= len(landed), "the bytes of landed blocks are there"
    time.sleep(0.05)
    assert (peer.blocks == after).all(), "the dead sender writes nothing more"
    receiver.close()
    other = make_peer(device, 32)
    other.fill_random(3)
    works_again(other, peer, connector)


@pytest.mark.parametrize("case", CONNECTORS, ids=" ".join)
def test_the_receiver_is_killed(bus: BusConfig, make_peer: Callable[..., Peer], case: tuple[str, str]) -> None:
    connector, device = case
    peer = make_peer(device)
    peer.fill_random()
    gc.collect()  # what tests before this one have left
    before = mapped_arenas()
    ended: list[SenderEnded] = []
    with process("receive", bind=bus.bind, num_blocks=NUM_BLOCKS, device=device) as receiver:
        link = peer.sender(receiver.wait("bound"), connector)
        link.begin(1, 1)
        link.write(1, list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)), range(LARGE.num_layers))

        def step() -> bool:
            ended.extend(link.poll())
            return bool(ended)

        with killed_in_mid_copy(receiver.pid, KILL_AFTER):
            poll_until(step)
        receiver.process.join(10)
    assert [(event.number, event.outcome) for event in ended] == [(1, Sent.LINK_LOST)]
    assert "closed" in link.closed or "NIXL_ERR_REMOTE_DISCONNECT" in link.closed
    assert link.open_transfers() == {}
    assert mapped_arenas() <= before, "the memory of the dead process is given back"
    assert (peer.blocks == arena_contents()).all()
    link.begin(2, 1)
    assert [event.outcome for event in link.poll()] == [Sent.LINK_LOST]
    link.close()
    works_again(peer, make_peer(device, 32), connector)


def test_kills_leave_no_file_behind(bus: BusConfig) -> None:
    with process("receive", bind=bus.bind, num_blocks=NUM_BLOCKS) as receiver:
        receiver.wait("bound")
        receiver.process.kill()
        receiver.process.join(10)
    assert not [name for name in os.listdir("/dev/shm") if "blockyard-kv" in name]
    assert [path for path in Path(bus.bind.removeprefix("ipc://")).iterdir() if not path.is_socket()] == []


@pytest.mark.parametrize("connector", ["shm", pytest.param("nixl", marks=needs_nixl)])
def test_a_link_that_breaks_between_two_living_workers_proves_nothing(
    make_peer: Callable[..., Peer], connector: str
) -> None:
    """The sender may still write to the memory it has mapped: blocks stay reserved until it says that it stopped, over
    its next link, or to the scheduler.
    """
    source, peer = make_peer("host", 32), make_peer()
    pair = Pair(source, peer, connector)
    transfers = [pair.begin(1, [4, 5]), pair.begin(2, [6])]
    pair.until(lambda: pair.sender.connector == connector)
    pair.break_link()
    pair.until(lambda: len(pair.unreachable) == 2)
    assert pair.receiver.open_transfers() == transfers and not pair.ended
    pair.receiver.revoke(1)
    pair.until(lambda: len(pair.unreachable) == 3)
    assert pair.unreachable == [1, 2, 1] and not pair.ended
    pair.receiver.revoke(1, sender_stopped=True)
    pair.until(lambda: 1 in pair.ended)
    assert pair.receiver.open_transfers() == transfers[1:]
    pair.sender = source.sender(pair.receiver.endpoint, connector)
    pair.until(lambda: 2 in pair.ended)
    assert pair.ended[2].outcome is Received.SENDER_LOST
    pair.close()
    source.close()
