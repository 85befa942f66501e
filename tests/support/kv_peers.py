"""Two ends of KV transfers for tests: in this process, and as processes that can be killed."""

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
import zmq

from blockyard.services.kv_transfer.arena import Arena, DeviceArena, HostArena, map_arena
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.host_copies import Words, blocks_of
from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun, LayoutPart, LinkLayouts
from blockyard.services.kv_transfer.link_sockets import transfer_sockets
from blockyard.services.kv_transfer.protocol.events import BlocksLanded, ReceiverEnded, SenderEnded, SenderUnreachable
from blockyard.services.kv_transfer.protocol.frames import HostArenaHandle, Transfer
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite, OutgoingTransfers
from blockyard.services.kv_transfer.receiver import TransferReceiver
from blockyard.services.kv_transfer.sender_link import SenderLink
from blockyard.shared.bus.curve import write_keys
from blockyard.shared.config.kv_transfer import has_nixl
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import KVTransferConfig

E = TypeVar("E", SenderLink, TransferReceiver)

SMALL = BlockLayout(runs=(LayerRun(3, 2, 8),), block_size=4, dtype="float32", dtype_bytes=4)
LARGE = BlockLayout(runs=(LayerRun(8, 8, 64),), block_size=16, dtype="float32", dtype_bytes=4)  # 512 KiB
MIXED = BlockLayout(  # pieces of 512, 384 and 512 bytes
    runs=(LayerRun(2, 2, 8), LayerRun(1, 1, 24, planes=1), LayerRun(2, 2, 8)),
    block_size=4,
    dtype="float32",
    dtype_bytes=4,
)
SENDER, RECEIVER = 0x5E, 0x4E

needs_nixl = pytest.mark.skipif(not has_nixl(), reason="needs the package nixl")


def ipc_bus(folder: Path) -> BusConfig:
    return BusConfig(registry="ipc:///unused", bind=f"ipc://{folder}")


def tcp_bus(folder: Path, keys: str = "keys") -> BusConfig:
    """Its keys are written if there are none."""
    if not (folder / keys).exists():
        write_keys(folder / keys)
    return BusConfig(
        registry="tcp://127.0.0.1:1",
        bind="tcp://127.0.0.1",
        advertise="127.0.0.1",
        curve_public=str(folder / keys / "blockyard.key"),
        curve_secret=str(folder / keys / "blockyard.key_secret"),
    )


def bus_of(connector: str, folder: Path) -> BusConfig:
    """For links of one host: only those of tcp go over the network."""
    return tcp_bus(folder) if connector == "tcp" else ipc_bus(folder)


class Peer:
    """A worker's arena, copy thread and sockets."""

    def __init__(
        self, bus: BusConfig, layout: BlockLayout, num_blocks: int, encrypt: bool = True, device: str = "host"
    ) -> None:
        """device: "host", "cuda", or "cpu" for the memory of a fake GPU."""
        self.layout, num_bytes = layout, num_blocks * layout.block_bytes
        self.arena: Arena = HostArena(num_bytes) if device == "host" else DeviceArena(num_bytes, torch.device(device))
        self.copies = CopyThread()
        self.sockets = transfer_sockets(bus, encrypt)
        self._ends: list[zmq.Socket[Any]] = []

    @property
    def blocks(self) -> Words:
        """[layers, num_blocks, words] of layers that are alike; a copy of those on a GPU, see `put`."""
        (blocks,) = self.sections
        return blocks

    @property
    def sections(self) -> list[Words]:
        """The same of each section of the layout."""
        memory = self.arena.bytes if isinstance(self.arena, HostArena) else self.arena.bytes.to("cpu", copy=True)
        return blocks_of(memory.numpy(), self.layout)

    def put(self, blocks: Words) -> None:
        """Writes all blocks."""
        self.arena.bytes.copy_(torch.from_numpy(blocks.reshape(-1).view(np.uint8)))  # waits

    def fill_random(self, seed: int = 0) -> None:
        self.put(np.random.default_rng(seed).integers(0, 2**64, self.arena.bytes.numel() // 8, dtype=np.uint64))

    def sender(
        self,
        endpoint: str,
        connector: str = "auto",
        ticket: bytes = b"",
        me: int = SENDER,
        part: LayoutPart | None = None,
        theirs: LayoutPart | None = None,
    ) -> SenderLink:
        config = KVTransferConfig(connector=connector)
        own = (LinkLayouts(self.layout, part, theirs), self.arena, self.copies)
        return self._kept(SenderLink(self.sockets, endpoint, RECEIVER, me, *own, config, ticket))

    def receiver(self, needs_ticket: bool = False) -> TransferReceiver:
        return self._kept(TransferReceiver(self.sockets, RECEIVER, self.layout, self.arena, self.copies, needs_ticket))

    def _kept(self, end: E) -> E:
        self._ends += [end.socket, end.monitor]
        return end

    def close(self) -> None:
        self.copies.close()
        for one in self._ends:  # those that a failed test has left
            one.close(0)
        closing = threading.Thread(target=self.sockets.close, daemon=True)  # waits for others
        closing.start()
        closing.join(5)


class Pair:
    """A sender and a receiver in this process, and all their events."""

    def __init__(self, source: Peer, target: Peer, connector: str, part: LayoutPart | None = None) -> None:
        """part: that goes over the link; None: all."""
        self.source, self.target, self.part = source, target, part
        self.receiver = target.receiver()
        self.sender = source.sender(self.receiver.endpoint, connector, part=part, theirs=target.layout.part)
        self.sent: dict[int, SenderEnded] = {}
        self.landed: dict[int, list[int]] = {}
        self.unreachable: list[int] = []  # transfers whose sender is unreachable, each time that this is said
        self.ended: dict[int, ReceiverEnded] = {}

    def transfer(self, number: int, targets: list[int]) -> Transfer:
        generations = (self.source.arena.generation, self.target.arena.generation)
        return Transfer(number, SENDER, generations[0], RECEIVER, generations[1], targets, self.part)

    def begin(self, number: int, targets: list[int]) -> Transfer:
        """Opens a transfer on both sides."""
        transfer = self.transfer(number, targets)
        self.receiver.expect(transfer)
        self.sender.begin(number, self.target.arena.generation)
        return transfer

    def turn(self) -> None:
        for event in self.receiver.poll():
            if isinstance(event, BlocksLanded):
                self.landed.setdefault(event.number, []).extend(event.positions)
            elif isinstance(event, SenderUnreachable):
                self.unreachable.append(event.number)
            else:
                assert event.number not in self.ended
                self.ended[event.number] = event
        for sent in self.sender.poll():
            assert sent.number not in self.sent
            self.sent[sent.number] = sent

    def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.sent, self.ended, self.sender.closed, self.receiver.drops)
            self.turn()
            time.sleep(0.0002)

    def break_link(self) -> None:
        """The sender loses its link in its next turn, without a word to the receiver."""
        self.sender.monitor.close(0)
        self.turn()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def mapped_arenas() -> int:
    """Arenas that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:blockyard-kv")


@contextmanager
def process(role: str, **settings: Any) -> Iterator["PeerProcess"]:
    peer = PeerProcess(role, settings)
    try:
        yield peer
    finally:
        peer.process.kill()
        peer.process.join()
        peer.process.close()
        peer.events.close()


@functools.cache
def forkserver() -> ForkServerContext:
    """Imports torch once for all processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kv_peers"])
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server does not get this process's path otherwise
    multiprocessing.forkserver.ensure_running()
    os.environ["PYTHONPATH"] = before
    return context


class PeerProcess:
    """One end in a process of its own. It sends (name, values) of its events."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        context = forkserver()
        self.events, theirs = context.Pipe()
        self.process = context.Process(target=PEERS[role], args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def wait(self, name: str, timeout_s: float = 30.0) -> Any:
        """The values of the next event of that name."""
        deadline = time.monotonic() + timeout_s
        while self.events.poll(deadline - time.monotonic()):
            found, values = self.events.recv()
            if found == name:
                return values
        raise AssertionError(f"no {name}")


class Mapper:
    """A process that has an arena of its own, or maps this process's."""

    def __init__(self) -> None:
        self._pipe, theirs = forkserver().Pipe()
        self.process = forkserver().Process(target=run_mapper, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> "Mapper":
        return self

    def __exit__(self, *args: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()

    def map(self, handle: HostArenaHandle) -> None:
        self._ask("map", handle)

    def read(self, at: int) -> int:
        return int(self._ask("read", at))

    def write(self, at: int, value: int) -> None:
        self._ask("write", at, value)

    def export(self, num_bytes: int) -> HostArenaHandle:
        return msgspec.convert(self._ask("export", num_bytes), HostArenaHandle)

    def _ask(self, *question: Any) -> Any:
        self._pipe.send([msgspec.to_builtins(part, builtin_types=(bytes,)) for part in question])
        assert self._pipe.poll(30)
        return self._pipe.recv()


def run_mapper(pipe: "Connection") -> None:
    while True:
        match pipe.recv():
            case ["map", handle]:
                mapped = map_arena(msgspec.convert(handle, HostArenaHandle))
                pipe.send(None)
            case ["read", at]:
                pipe.send(int(mapped[at]))
            case ["write", at, value]:
                mapped[at] = value
                pipe.send(None)
            case ["export", num_bytes]:
                arena = HostArena(num_bytes)
                pipe.send(msgspec.to_builtins(arena.export(1), builtin_types=(bytes,)))


def run_receiver(events: "Connection", settings: dict[str, Any]) -> None:
    """Reports how transfer 1 ends, with the bytes of its blocks in their order. Drops its memory if it is told to."""
    peer = peer_of(settings)
    receiver = peer.receiver()
    blocks = settings.get("blocks", list(range(settings["num_blocks"])))
    receiver.expect(Transfer(1, SENDER, 1, RECEIVER, 1, blocks))
    events.send(("bound", receiver.endpoint))
    while True:
        for event in receiver.poll():
            if isinstance(event, ReceiverEnded):
                events.send(("ended", (event.outcome.value, event.landed, peer.blocks[:, blocks].tobytes())))
        if events.poll(0.0005):
            events.recv()
            receiver.close()
            peer.arena.drop()
            events.send(("dropped", None))
            receiver = peer.receiver()


def run_sender(events: "Connection", settings: dict[str, Any]) -> None:
    """Writes the first part, and the rest when it is told that that has landed; then it kills itself in mid-copy."""
    peer = peer_of(settings)
    peer.fill_random()
    link = peer.sender(settings["endpoint"], settings["connector"])
    blocks, first = list(range(settings["num_blocks"])), settings["first_part"]
    link.begin(1, 1)
    link.write(1, blocks[:first], blocks[:first], range(LARGE.num_layers))
    while not events.poll(0.0002):
        link.poll()
    with killed_in_mid_copy(os.getpid(), settings["kill_after"]):
        link.write(1, blocks[first:], blocks[first:], range(LARGE.num_layers))
        while True:
            link.poll()
            time.sleep(0.0002)


def peer_of(settings: dict[str, Any]) -> Peer:
    os.environ.update(settings.get("env", {}))
    device = settings.get("device", "host")
    if device != "host":
        small_copies_of_gpus()
    bus = BusConfig(registry="ipc:///unused", bind=settings["bind"])
    return Peer(bus, LARGE, settings["num_blocks"], device=device)


def small_copies_of_gpus() -> None:
    """Makes copies to mapped GPU memory as small as those of host memory, so that a transfer has many."""
    # imports Triton, which must not be imported before TRITON_INTERPRET is set
    from blockyard.services.kv_transfer import device_copier

    device_copier.DeviceCopier.chunk_bytes = 4 << 20
    DeviceArena.staging = replace(DeviceArena.staging, buffer_bytes=4 << 20)


PEERS = {"send": run_sender, "receive": run_receiver}


@contextmanager
def killed_in_mid_copy(pid: int, after: int) -> Iterator[None]:
    """Kills a process once that many copies of this process are complete and the next one runs."""
    next_write, on_written, count = OutgoingTransfers.next_write, OutgoingTransfers.on_written, [0]

    def counted(transfers: OutgoingTransfers, *args: Any) -> bool:
        count[0] += 1
        return on_written(transfers, *args)

    def next_or_kill(transfers: OutgoingTransfers) -> BlockWrite | None:
        if count[0] >= after and transfers.num_copies:
            count[0] = -1000
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)  # the link breaks before the next copy is started
        return next_write(transfers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutgoingTransfers, "on_written", counted)
        patch.setattr(OutgoingTransfers, "next_write", next_or_kill)
        yield


def poll_both(receiver: TransferReceiver, sender: SenderLink, until: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, (sender.closed, receiver.drops.by_reason)
        receiver.poll()
        sender.poll()
        time.sleep(0.0005)
