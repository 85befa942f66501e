"""nixl alone: what proves that a sender writes no more, failed and stalled writes, and settings that cannot work."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kv_peers import LARGE, RECEIVER, SENDER, SMALL, Pair, Peer, needs_nixl, process

from blockyard.services.kv_transfer.connectors import nixl, nixl_access
from blockyard.services.kv_transfer.connectors.nixl_agent import NixlAgent, Region, host_id
from blockyard.services.kv_transfer.protocol.events import (
    BlocksLanded,
    Received,
    ReceiverEnded,
    SenderUnreachable,
    Sent,
)
from blockyard.services.kv_transfer.protocol.frames import Transfer
from blockyard.services.kv_transfer.receiver import TransferReceiver
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.errors import ConfigError

ALL = range(SMALL.num_layers)
NUM_BLOCKS, FIRST_PART = 64, 8
TCP = {"UCX_TLS": "tcp"}  # as between hosts: the receiver's UCX copies the bytes into its memory


def poll_until(step: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not step():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def unread_bytes() -> bool:
    """Whether a TCP socket of this process has bytes that it has not read."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # of `listdir`
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(int(row[4].split(":")[1], 16) > 0 and f"socket:[{row[9]}]" in own for row in rows)


@needs_nixl
def test_bytes_of_a_dead_sender_do_not_arrive_after_its_transfer_has_ended(
    bus: BusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in a socket when it dies, and UCX would copy them into memory in the receiver's next turn."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    progress, may_progress = NixlAgent.progress, threading.Event()
    may_progress.set()
    monkeypatch.setattr(NixlAgent, "progress", lambda agent: progress(agent) if may_progress.is_set() else None)
    peer = Peer(bus, LARGE, NUM_BLOCKS)
    receiver, landed, ended = peer.receiver(), [], []
    receiver.expect(Transfer(1, SENDER, 1, RECEIVER, 1, list(range(NUM_BLOCKS))))

    def step() -> None:
        for event in receiver.poll():
            if not isinstance(event, SenderUnreachable):
                (landed if isinstance(event, BlocksLanded) else ended).append(event)

    settings = {"bind": bus.bind, "num_blocks": NUM_BLOCKS, "endpoint": receiver.endpoint, "env": TCP}
    with process("send", **settings, connector="nixl", first_part=FIRST_PART, kill_after=1000) as sender:
        poll_until(lambda: (step(), sum(len(event.positions) for event in landed) == FIRST_PART)[1])
        may_progress.clear()
        sender.events.send("go on")
        poll_until(unread_bytes)
        os.kill(sender.pid, signal.SIGKILL)
        sender.process.join(10)
        poll_until(lambda: (step(), ended)[1])
    assert isinstance(ended[0], ReceiverEnded) and ended[0].outcome is Received.SENDER_LOST
    assert receiver.open_transfers() == []
    before = peer.blocks.copy()
    may_progress.set()
    time.sleep(0.2)
    assert (peer.blocks == before).all()
    receiver.close()
    peer.close()


@needs_nixl
def test_a_sender_of_another_host_is_stopped_by_the_end_of_the_receivers_agent(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "host_id", lambda: ("other", 1))
    destroy, release, destroyed = NixlAgent.destroy, threading.Event(), threading.Event()

    def held(agent: NixlAgent) -> None:
        if threading.current_thread().name == "kv-nixl-reads":
            release.wait(10)
            destroy(agent)
            destroyed.set()
        else:
            destroy(agent)

    monkeypatch.setattr(NixlAgent, "destroy", held)
    pair = Pair(*peers, "nixl")
    transfer = pair.begin(1, [4, 5])
    pair.sender.write(1, [7], [4], ALL)
    pair.until(lambda: 1 in pair.landed)
    assert not pair.receiver._processes
    pair.sender._lose("test")
    for _ in range(50):
        pair.turn()
        time.sleep(0.002)
    assert pair.receiver.open_transfers() == [transfer] and not pair.ended
    release.set()
    pair.until(lambda: 1 in pair.ended)
    assert destroyed.is_set() and pair.ended[1].outcome is Received.SENDER_LOST
    pair.close()


@needs_nixl
def test_a_write_that_fails_closes_the_link_without_a_word_about_its_transfer(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may still be on the way. A frame `Stopped` would make the receiver reuse the blocks."""
    pair = Pair(*peers, "nixl")
    transfer = pair.begin(1, [4, 5])
    pair.until(lambda: pair.sender.connector == "nixl")
    start = NixlAgent.start

    def broken(agent: NixlAgent, *args: object) -> object:
        start(agent, *args)  # type: ignore[arg-type]
        raise ConnectionError("nixl transfer: test")

    monkeypatch.setattr(NixlAgent, "start", broken)
    pair.sender.write(1, [7], [4], ALL)
    pair.until(lambda: 1 in pair.sent)
    assert pair.sent[1].outcome is Sent.LINK_LOST and "nixl transfer: test" in pair.sender.closed
    pair.until(lambda: not pair.receiver._links)
    for _ in range(20):
        pair.turn()
    assert pair.receiver.open_transfers() == [transfer], "this process, the sender, lives"
    monkeypatch.setattr(NixlAgent, "start", start)
    pair.sender = peers[0].sender(pair.receiver.endpoint, "nixl")
    pair.until(lambda: 1 in pair.ended)
    assert pair.ended[1].outcome is Received.SENDER_LOST
    pair.close()


@needs_nixl
def test_a_receiver_that_stands_still_costs_its_link_only(bus: BusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """nixl waits for it without an end."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    peer = Peer(bus, LARGE, NUM_BLOCKS)
    peer.fill_random()
    ended = []
    with process("receive", bind=bus.bind, num_blocks=NUM_BLOCKS, env=TCP) as receiver:
        link = peer.sender(receiver.wait("bound"), "nixl")
        link.begin(1, 1)
        poll_until(lambda: (link.poll(), link._transfers._open[1].blocks is not None)[1])
        monkeypatch.setattr(nixl, "STALLED_S", 0.1)
        os.kill(receiver.pid, signal.SIGSTOP)
        link.write(1, list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)), range(LARGE.num_layers))
        poll_until(lambda: (ended.extend(link.poll()), ended)[1])
        assert "does not answer nixl" in link.closed and ended[0].outcome is Sent.LINK_LOST
        assert link.open_transfers() == {}
        link.close()
    peer.close()


@needs_nixl
def test_close_ends_copies_that_do_not_complete(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard.services.kv_transfer.sender_link.CLOSE_S", 0.05)
    pair = Pair(*peers, "nixl")
    pair.begin(1, [4, 5])
    pair.until(lambda: pair.sender.connector == "nixl")
    monkeypatch.setattr(NixlAgent, "is_done", lambda agent, handle: False)
    pair.sender.write(1, [7, 8], [4, 5], ALL)
    pair.until(lambda: pair.sender._transfers.num_copies == 1)
    pair.sender.close()
    assert [event.outcome for event in pair.sender.poll()] == [Sent.ABORTED]
    assert pair.sender.open_transfers() == {}
    pair.until(lambda: not pair.receiver._links)
    assert len(pair.receiver.open_transfers()) == 1, "no frame says that the copy has ended"
    pair.close()


@needs_nixl
def test_an_agent_in_use_is_not_called_destroyed() -> None:
    memory = np.zeros(4096, np.uint8)
    region = Region(memory.ctypes.data, memory.nbytes)
    one, other = NixlAgent("one", [], [region]), NixlAgent("other", ["UCX"], [region])
    one.connect(other.metadata())
    pieces = region.piece(0, 16)
    kept = one.start("WRITE", pieces, "DRAM", pieces, "DRAM")
    with pytest.raises(RuntimeError, match="still in use"):
        one.destroy()
    del kept
    other.destroy()


@needs_nixl
def test_metadata_that_is_none(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = NixlAgent.metadata
    for damaged in (b"", b"garbage", None):
        monkeypatch.setattr(NixlAgent, "metadata", lambda agent, it=damaged: metadata(agent)[:-9] if it is None else it)
        pair = Pair(*peers, "nixl")
        pair.until(lambda pair=pair: bool(pair.sender.closed))
        assert "add_remote_agent" in pair.sender.closed
        pair.close()


@needs_nixl
def test_a_new_link_reads_the_receivers_token(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    encode = msgspec.msgpack.encode
    monkeypatch.setattr(
        nixl.msgspec.msgpack, "encode", lambda target: encode(msgspec.structs.replace(target, token=bytes(16)))
    )
    pair = Pair(*peers, "nixl")
    pair.until(lambda: bool(pair.sender.closed))
    assert "other memory" in pair.sender.closed
    pair.close()


@needs_nixl
def test_two_pid_namespaces_on_one_host(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    boot, namespace = host_id()
    monkeypatch.setattr(nixl_access, "host_id", lambda: (boot, namespace + 1))
    pair = Pair(*peers, "nixl")
    pair.until(lambda: bool(pair.sender.closed))
    assert "different PID namespaces" in pair.sender.closed and "tcp" in pair.sender.closed
    pair.close()


@needs_nixl
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_backends_are_passed_on(peers: tuple[Peer, Peer], side: str) -> None:
    source, target = peers
    config = KVTransferConfig(connector="nixl", backends=["CARRIER_PIGEON"])
    receiver = TransferReceiver(
        target.sockets, RECEIVER, SMALL, target.arena, target.copies, config=config if side == "receiver" else None
    )
    link = source.sender(receiver.endpoint, "nixl")
    if side == "sender":
        link._config = config
    poll_until(lambda: (receiver.poll(), link.poll(), link.closed)[2])
    assert "no backend CARRIER_PIGEON: use one of" in link.closed and "UCX" in link.closed
    link.close()
    receiver.close()


def test_without_the_package_one_line_names_the_command(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nixl", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
    pair = Pair(*peers, "nixl")
    pair.until(lambda: bool(pair.sender.closed))
    assert "refused" in pair.sender.closed and "pip install nixl-cu13" in pair.sender.closed
    pair.close()
    with pytest.raises(ConfigError, match="pip install nixl-cu13"):
        TransferReceiver(
            peers[1].sockets,
            RECEIVER,
            SMALL,
            peers[1].arena,
            peers[1].copies,
            config=KVTransferConfig(connector="nixl"),
        )


@needs_nixl
def test_no_new_link_is_opened_while_nixl_may_still_write(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(*peers, "nixl")
    pair.until(lambda: pair.sender.connector == "nixl")
    destroy, release = NixlAgent.destroy, threading.Event()
    monkeypatch.setattr(NixlAgent, "destroy", lambda agent: (release.wait(10), destroy(agent)))
    monkeypatch.setattr(nixl, "END_S", 0.05)
    with pytest.raises(RuntimeError, match="does not end"):
        pair.sender.close()
    release.set()
    monkeypatch.setattr(nixl, "END_S", 5.0)
    pair.sender.close()
    pair.receiver.close()
