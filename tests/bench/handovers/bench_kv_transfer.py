"""KV transfers between two processes of this host: shared memory and nixl against memcpy, TCP against a socket pair.

`python tests/bench/handovers/bench_kv_transfer.py [--mib 16 64] [--rounds 9] [--tokens 16]`

Blocks are those of an 8B model in bf16 with `--layers` layers (64 KiB a layer at 16 tokens). "scattered": no two blocks
are neighbours on both sides. A time is from the call of `write` in one process until the other knows that all blocks
landed, the best of some rounds, and the plain copy is measured in the same run.
"""

import argparse
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS.parent / ".src"), str(TESTS / "support")]
sys.path[:] = [entry for entry in sys.path if entry != str(TESTS.parent)]

import numpy as np  # noqa: E402
import zmq  # noqa: E402
from kv_peers import RECEIVER, SENDER, Peer, bus_of  # noqa: E402

from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun  # noqa: E402
from blockyard.services.kv_transfer.protocol.events import Received, ReceiverEnded  # noqa: E402
from blockyard.services.kv_transfer.protocol.frames import Transfer  # noqa: E402
from blockyard.shared.config.kv_transfer import has_nixl  # noqa: E402
from blockyard.shared.config.services.process import BusConfig  # noqa: E402

BUFFER = 2 << 20  # of the plain socket pair


def best(rounds: int, work: Callable[[], float]) -> float:
    return min(work() for _ in range(rounds))


def layout_of(layers: int, tokens: int, checksums: bool = True) -> BlockLayout:
    return BlockLayout(
        runs=(LayerRun(layers, 8, 128),),
        block_size=tokens,
        dtype="bfloat16",
        dtype_bytes=2,
        checksums=checksums,
    )


def run_receiver(events: Connection, bus: BusConfig, encrypt: bool, layout: BlockLayout, num_blocks: int) -> None:
    peer = Peer(bus, layout, num_blocks, encrypt)
    peer.fill_random(1)  # all pages are in memory
    receiver = peer.receiver(needs_ticket=not encrypt)
    receiver.admit(b"ticket", SENDER)
    events.send(receiver.endpoint)
    poller = poller_of(receiver, peer)
    poller.register(events.fileno(), zmq.POLLIN)
    while True:
        poller.poll(1 if receiver.busy else 100)
        if events.poll():
            if (transfer := events.recv()) is None:
                return
            receiver.expect(transfer)
        for event in receiver.poll():
            if isinstance(event, ReceiverEnded):
                assert event.outcome is Received.LANDED, event
                events.send(time.monotonic())


def poller_of(link: Any, peer: Peer) -> zmq.Poller:
    poller = zmq.Poller()
    for it in (link.socket, link.monitor, peer.copies.descriptor):
        poller.register(it, zmq.POLLIN)
    return poller


class Link:
    """A sender in this process and a receiver in another one."""

    def __init__(self, connector: str, encrypt: bool, layout: BlockLayout, num_blocks: int, folder: Path) -> None:
        bus = bus_of(connector, folder)
        self.layout, self.num_blocks = layout, num_blocks
        self.events, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=run_receiver, args=(theirs, bus, encrypt, layout, num_blocks), daemon=True
        )
        self.process.start()
        self.peer = Peer(bus, layout, num_blocks, encrypt)
        self.peer.fill_random()
        self.link = self.peer.sender(self.events.recv(), connector, b"" if encrypt else b"ticket")
        self.poller = poller_of(self.link, self.peer)
        self.number = 0

    def seconds(self, sources: list[int], targets: list[int]) -> float:
        self.number += 1
        transfer = Transfer(self.number, SENDER, 1, RECEIVER, 1, targets)
        self.events.send(transfer)
        self.link.begin(self.number, 1)
        while self.link._transfers._open[self.number].blocks is None:
            self.poller.poll(10)
            self.link.poll()
        began = time.monotonic()
        self.link.write(self.number, sources, targets, range(self.layout.num_layers))
        self.link.poll()
        while self.link.open_transfers():
            self.poller.poll(1 if self.link.busy else 100)
            self.link.poll()
        assert not self.link.closed, self.link.closed
        return float(self.events.recv()) - began

    def memcpy_s(self, num_bytes: int) -> float:
        """Copies within the sender's memory: as many bytes, in order."""
        words = self.peer.blocks.reshape(-1)
        half = len(words) // 2
        count = min(num_bytes // 8, half)
        began = time.monotonic()
        np.copyto(words[half : half + count], words[:count])
        return (time.monotonic() - began) * num_bytes / (8 * count)

    def close(self) -> None:
        self.link.close()
        self.events.send(None)
        self.process.join(5)
        self.process.kill()
        self.peer.close()


def receive_plainly(events: Connection, num_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        events.send(server.getsockname()[1])
        connection = server.accept()[0]
        buffer = memoryview(bytearray(BUFFER))
        while True:
            left = num_bytes
            while left:
                got = connection.recv_into(buffer[: min(left, BUFFER)])
                if not got:
                    return
                left -= got
            events.send(time.monotonic())


def plain_socket_s(num_bytes: int, rounds: int) -> float:
    events, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=receive_plainly, args=(theirs, num_bytes), daemon=True
    )
    process.start()
    data = memoryview(np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8))

    def once() -> float:
        began = time.monotonic()
        for at in range(0, num_bytes, BUFFER):
            connection.sendall(data[at : at + BUFFER])
        return float(events.recv()) - began

    with socket.create_connection(("127.0.0.1", events.recv())) as connection:
        seconds = best(rounds, once)
    process.join(5)
    return seconds


def ids(num_blocks: int, count: int, order: str, seed: int) -> list[int]:
    if order == "in order":
        return list(range(count))
    return random.Random(seed).sample(range(num_blocks), count)


def row(name: str, num_bytes: int, seconds: float, plain_s: float, plain: str) -> None:
    gbps = num_bytes / seconds / 1e9
    print(
        f"{name:44} {1000 * seconds:8.2f} ms {gbps:6.2f} GB/s   {plain_s / seconds:5.0%} of {plain}"
        f" ({num_bytes / plain_s / 1e9:.2f} GB/s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=16, help="of a block")
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    cases = [("shm", True), ("tcp", False), ("tcp", True)] + [("nixl", True)] * has_nixl()
    with tempfile.TemporaryDirectory() as name:
        for mib in args.mib:
            plain_s = plain_socket_s(mib << 20, args.rounds)
            for connector, encrypt in cases:
                for checksums in (False, True):
                    layout = layout_of(args.layers, args.tokens, checksums)
                    count = (mib << 20) // layout.block_bytes
                    link = Link(connector, encrypt, layout, 2 * count + 1, Path(name))
                    for order in ("in order", "scattered"):
                        sources, targets = (ids(link.num_blocks, count, order, seed) for seed in (1, 2))
                        link.seconds(sources, targets)
                        times, copies = [], []
                        for _ in range(args.rounds):
                            times.append(link.seconds(sources, targets))
                            copies.append(link.memcpy_s(mib << 20))
                        way = connector if connector != "tcp" else f"tcp {'curve' if encrypt else 'plain'}"
                        title = f"{mib} MiB {way}, {order}, checksums {'on' if checksums else 'off'}"
                        base = (min(copies), "memcpy") if connector != "tcp" else (plain_s, "a socket pair")
                        row(title, mib << 20, min(times), *base)
                    link.close()


if __name__ == "__main__":
    main()
