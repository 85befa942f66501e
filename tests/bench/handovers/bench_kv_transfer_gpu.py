"""KV transfers between two processes on GPUs, against a plain copy of as many bytes in the same run.

`python tests/bench/handovers/bench_kv_transfer_gpu.py [--rounds 20] [--connectors cuda_ipc nixl tcp] [--kills]`

With two GPUs each process sees its own one alone; with one GPU both use it. Blocks are those of an 8B model in bf16, 16
tokens each (64 KiB a layer), scattered in both pools.
"kernel": from CUDA events of the sender. "link": from the call of `write` in one process until the other knows that all
blocks have landed with the right checksums; both processes poll without sleep. Medians.
`--kills`: kill -9 of either side in the middle of a copy that takes some 100 ms, because it has one program.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS.parent / ".src"), str(TESTS / "support")]
sys.path[:] = [entry for entry in sys.path if entry != str(TESTS.parent)]

import torch  # noqa: E402
import zmq  # noqa: E402
from kv_peers import RECEIVER, SENDER, Peer, bus_of  # noqa: E402

from blockyard.kernels.kv_cache.copy_blocks import copy_blocks  # noqa: E402
from blockyard.services.kv_transfer import device_copier  # noqa: E402
from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun  # noqa: E402
from blockyard.services.kv_transfer.protocol.events import ReceiverEnded  # noqa: E402
from blockyard.services.kv_transfer.protocol.frames import Transfer  # noqa: E402
from blockyard.shared.config.services.process import BusConfig  # noqa: E402

NUM_BLOCKS = 1100
LAYERS = 32
TIMEOUT_S = 60.0


def layout_of(checksums: bool) -> BlockLayout:
    return BlockLayout(
        runs=(LayerRun(LAYERS, 8, 128),),
        block_size=16,
        dtype="bfloat16",
        dtype_bytes=2,
        checksums=checksums,
    )


class Side:
    """A process with an arena, which answers commands of the parent."""

    def __init__(self, role: Callable[..., None], gpu: str | None, *settings: Any) -> None:
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=role, args=(theirs, *settings), daemon=True)
        self.process.start()
        theirs.close()
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before

    def ask(self, *question: Any) -> Any:
        self.pipe.send(question)
        return self.answer()

    def answer(self) -> Any:
        assert self.pipe.poll(TIMEOUT_S), "no answer"
        return self.pipe.recv()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def memory_of(peer: Peer) -> torch.Tensor:
    return peer.arena.bytes.view(torch.int64).view(LAYERS, NUM_BLOCKS, -1)


def digest(peer: Peer, blocks: list[int]) -> int:
    """A sum of all words, which depends on the places of layers and blocks."""
    total = 0
    for place, block in enumerate(blocks):
        layers = torch.arange(1, LAYERS + 1, device="cuda")
        total += (place + 1) * int((memory_of(peer)[:, block].sum(1) * layers).sum())
    return total % 2**64


def works() -> bool:
    x = torch.eye(512, device="cuda")
    return bool(torch.equal(x @ x, x))


def waiter(link: Any, peer: Peer, pipe: Connection) -> Callable[[], None]:
    """Waits until `link` has work."""
    poller = zmq.Poller()
    for it in (link.socket, link.monitor, peer.copies.descriptor, pipe.fileno()):
        poller.register(it, zmq.POLLIN)

    def wait() -> None:
        poller.poll(0 if link.needs_polling else 1 if link.busy else 100)

    return wait


def run_receiver(pipe: Connection, bus: BusConfig, encrypt: bool, checksums: bool) -> None:
    peer = Peer(bus, layout_of(checksums), NUM_BLOCKS, encrypt, device="cuda")
    receiver = peer.receiver(needs_ticket=not encrypt)
    receiver.admit(b"ticket", SENDER)
    pipe.send(receiver.endpoint)
    wait = waiter(receiver, peer, pipe)
    while True:
        wait()
        for event in receiver.poll():
            if isinstance(event, ReceiverEnded):
                at = time.monotonic()
                pipe.send((at, event.outcome.value, len(event.landed)))
        if not pipe.poll():
            continue
        match pipe.recv():
            case ["expect", transfer]:
                receiver.expect(transfer)
                pipe.send(None)
            case ["digest", blocks]:
                pipe.send(digest(peer, blocks))
            case ["poison"]:
                peer.arena.bytes.fill_(0x5A)
                torch.cuda.synchronize()
                pipe.send(None)
            case ["unchanged for", seconds]:
                first = peer.arena.bytes.clone()
                torch.cuda.synchronize()
                time.sleep(seconds)
                changed = int((first.view(torch.int64) != 0x5A5A5A5A5A5A5A5A).sum()) / (first.numel() // 8)
                pipe.send((bool(torch.equal(first, peer.arena.bytes)), changed, works()))


def run_sender(
    pipe: Connection, bus: BusConfig, encrypt: bool, checksums: bool, endpoint: str, connector: str, programs: int
) -> None:
    device_copier.PROGRAMS = programs
    if programs == 1:
        device_copier.DeviceCopier.chunk_bytes = 2 << 30
    peer = Peer(bus, layout_of(checksums), NUM_BLOCKS, encrypt, device="cuda")
    memory_of(peer).random_(-(2**63), 2**63 - 1)
    torch.cuda.synchronize()
    link = peer.sender(endpoint, connector, b"" if encrypt else b"ticket")
    wait, ended = waiter(link, peer, pipe), link.poll()
    while not link.connector:
        wait()
        link.poll()
        assert not link.closed, link.closed
    pipe.send(link.connector)
    while True:
        if not pipe.poll():
            ended += link.poll()
            if link.closed:
                time.sleep(0.01)
            else:
                wait()
            continue
        match pipe.recv():
            case ["send", number, sources, targets]:
                pipe.send(send(link, wait, number, sources, targets))
            case ["start a copy", then_die, number, sources, targets]:
                running = start_copy(link, number, sources, targets)
                pipe.send((time.monotonic(), running))
                if then_die:
                    os.kill(os.getpid(), signal.SIGKILL)
            case ["outlive"]:
                while not link.closed or link.open_transfers():
                    ended += link.poll()
                ended += link.poll()
                pipe.send(([event.outcome.value for event in ended], link.closed, works()))
            case ["digest", blocks]:
                pipe.send(digest(peer, blocks))
            case ["kernel", sources, targets, programs, with_sums, rounds]:
                pipe.send(kernel_s(link, sources, targets, programs, with_sums, rounds))


def start_copy(link: Any, number: int, sources: list[int], targets: list[int]) -> bool:
    """Returns whether it still runs after a while."""
    link.begin(number, 1)
    link.write(number, sources, targets, range(LAYERS))
    while not link._transfers._open[number].in_flight:
        link.poll()
    time.sleep(0.02)
    link.poll()
    return bool(link._transfers._open[number].in_flight)


def send(link: Any, wait: Callable[[], None], number: int, sources: list[int], targets: list[int]) -> float:
    """Sends blocks. Returns the time at which the receiver had already allowed it."""
    link.begin(number, 1)
    while link._transfers._open[number].blocks is None:
        wait()
        link.poll()
    began = time.monotonic()
    link.write(number, sources, targets, range(LAYERS))
    link.poll()
    while link.open_transfers():
        wait()
        link.poll()
    return began


def kernel_s(link: Any, sources: list[int], targets: list[int], programs: int, with_sums: bool, rounds: int) -> float:
    section, theirs = link._own._sections[0], link._writer._theirs[0]
    ids = torch.tensor([sources, targets], dtype=torch.int32, device="cuda")
    sums = torch.zeros((LAYERS, len(sources)), dtype=torch.int64).pin_memory()
    checksums = (*section.tables, sums) if with_sums else None
    return events_s(
        lambda: copy_blocks(section.own, theirs, ids, LAYERS, checksums=checksums, programs=programs), rounds
    )


def events_s(work: Callable[[], object], rounds: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000)  # the launch is not measured
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def run_plain(pipe: Connection, rounds: int) -> None:
    """Copies between both GPUs, or within the only one."""
    there = torch.device("cuda", torch.cuda.device_count() - 1)
    while True:
        (num_bytes,) = pipe.recv()
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda:0")
        target = torch.empty_like(source, device=there)
        pipe.send(events_s(lambda source=source, target=target: target.copy_(source), rounds))


class Link:
    def __init__(self, connector: str, checksums: bool, folder: Path, gpus: list[str], programs: int = 32) -> None:
        encrypt = connector != "tcp"
        bus = bus_of(connector, folder)
        self.receiver = Side(run_receiver, gpus[-1], bus, encrypt, checksums)
        endpoint = self.receiver.answer()
        self.sender = Side(run_sender, gpus[0], bus, encrypt, checksums, endpoint, connector, programs)
        taken = self.sender.answer()
        assert taken == connector, taken
        self.number = 0

    def next(self, sources: list[int], targets: list[int]) -> tuple[int, list[int], list[int]]:
        self.number += 1
        self.receiver.ask("expect", Transfer(self.number, SENDER, 1, RECEIVER, 1, targets))
        return self.number, sources, targets

    def seconds(self, sources: list[int], targets: list[int]) -> float:
        began = self.sender.ask("send", *self.next(sources, targets))
        at, outcome, landed = self.receiver.answer()
        assert (outcome, landed) == ("landed", len(sources)), (outcome, landed)
        return float(at) - began

    def check(self, sources: list[int], targets: list[int]) -> None:
        assert self.sender.ask("digest", sources) == self.receiver.ask("digest", targets), "other bytes arrived"

    def stop(self) -> None:
        self.sender.stop()
        self.receiver.stop()


def row(name: str, num_bytes: int, seconds: float, plain_s: float) -> None:
    rate, plain = num_bytes / seconds / 1e9, num_bytes / plain_s / 1e9
    print(
        f"{name:56} {1e3 * seconds:8.3f} ms {rate:7.1f} GB/s {plain_s / seconds:5.0%} of plain {plain:.0f}", flush=True
    )


def scattered(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(NUM_BLOCKS), count)


def speeds(rounds: int, connectors: list[str], folder: Path, gpus: list[str]) -> None:
    plain = Side(run_plain, None, rounds)
    sizes = {tokens: (tokens // 16, tokens // 16 * layout_of(True).block_bytes) for tokens in (8192, 128)}
    plain_s = {tokens: float(plain.ask(num_bytes)) for tokens, (_, num_bytes) in sizes.items()}
    plain.stop()
    for connector in connectors:
        for checksums in (True, False):
            link = Link(connector, checksums, folder, gpus)
            for tokens, (count, num_bytes) in sizes.items():
                sources, targets = scattered(count, 1), scattered(count, 2)
                title = f"{tokens} tokens, {connector}, checksums {'on' if checksums else 'off'}"
                for programs in (8, 16, 32, 64, 132) if connector == "cuda_ipc" else ():
                    seconds = link.sender.ask("kernel", sources, targets, programs, checksums, rounds)
                    row(f"{title}, kernel, {programs} programs", num_bytes, seconds, plain_s[tokens])
                times = [link.seconds(sources, targets) for _ in range(5 if connector == "tcp" else rounds)]
                row(f"{title}, link", num_bytes, median(times[2:]), plain_s[tokens])
                link.check(sources, targets)
            link.stop()


def kills(folder: Path, gpus: list[str]) -> None:
    sources, targets = scattered(512, 1), scattered(512, 2)
    link = Link("cuda_ipc", True, folder, gpus, programs=1)
    link.receiver.ask("poison")
    killed, running = link.sender.ask("start a copy", True, *link.next(sources, targets))
    at, outcome, _ = link.receiver.answer()
    same, changed, lives = link.receiver.ask("unchanged for", 1.0)
    print(
        f"sender killed, its copy was running: {running}; {outcome} after {1e3 * (at - killed):.0f} ms, {changed:.1%}"
        f" of the pool was written, the same bytes 1 s later: {same}, the survivor computes: {lives}",
        flush=True,
    )
    link.stop()
    link = Link("cuda_ipc", True, folder, gpus, programs=1)
    _, running = link.sender.ask("start a copy", False, *link.next(sources, targets))
    link.receiver.process.kill()
    link.receiver.process.join()
    outcomes, closed, lives = link.sender.ask("outlive")
    print(
        f"receiver killed, the copy was running: {running}; {outcomes}, link: {closed!r}, the survivor computes:"
        f" {lives}",
        flush=True,
    )
    link.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--connectors", nargs="+", default=["cuda_ipc"], choices=("cuda_ipc", "nixl", "tcp"))
    parser.add_argument("--kills", action="store_true")
    args = parser.parse_args()
    gpus = [str(i) for i in range(min(2, torch.cuda.device_count()))]
    print(f"{len(gpus)} GPUs, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        if args.kills:
            kills(Path(name), gpus)
        speeds(args.rounds, args.connectors, Path(name), gpus)


if __name__ == "__main__":
    main()
