"""Workers' transfers without runners: in this process with fake links, and as processes that can be killed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fake_links import FakeLinks
from kv_peers import LARGE, forkserver

from blockyard.services.gpu_worker.transfers.worker_transfers import WorkerTransfers
from blockyard.services.kv_transfer.arena import HostArena
from blockyard.services.kv_transfer.host_copies import Words, blocks_of
from blockyard.services.kv_transfer.layout import BlockLayout
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import KVTransferConfig, WorkerConfig
from blockyard.shared.messages import (
    Geometry,
    KVAbort,
    KVLanded,
    KVReceive,
    KVSend,
    KVSendEnded,
    Member,
    Role,
    StepPlan,
)

GEOMETRY = Geometry(30, 4, 64, 100, [1], 4, 32)
NUM_BLOCKS = 128
TICKET = b"ticket of 16 byte"


class RawMemory:
    """`TransferBlocks` that records how it is used."""

    def __init__(self, layout: BlockLayout | None, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.renew()

    def renew(self) -> None:
        """A runner that begins anew has other memory."""
        self.arena = HostArena(self.num_blocks * (self.layout or LARGE).block_bytes)
        self.in_transfer: dict[int, set[int]] = {}
        self.without_kv: set[int] = set()

    @property
    def blocks(self) -> Words:
        assert self.layout is not None
        (blocks,) = blocks_of(self.arena.bytes.numpy(), self.layout)
        return blocks

    def fill_random(self, seed: int = 0) -> None:
        self.blocks[:] = np.random.default_rng(seed).integers(0, 2**64, self.blocks.shape, dtype=np.uint64)

    def begin_send(self, transfer: int, blocks: list[int]) -> None:
        self.in_transfer.setdefault(transfer, set()).update(blocks)

    def begin_receive(self, transfer: int, blocks: list[int]) -> None:
        assert transfer not in self.in_transfer
        self.in_transfer[transfer] = set(blocks)
        self.without_kv.update(blocks)

    def landed(self, blocks: list[int]) -> None:
        assert self.without_kv.issuperset(blocks), "landed twice"
        self.without_kv.difference_update(blocks)

    def end(self, transfer: int) -> None:
        self.in_transfer.pop(transfer, None)


class KVWorker:
    """The transfers of one worker, and all their answers."""

    def __init__(
        self, bus: BusConfig, me: int, layout: BlockLayout | None, num_blocks: int = 30, **settings: Any
    ) -> None:
        self.me, self.memory = me, RawMemory(layout, num_blocks)
        self.links = FakeLinks(Member(f"worker {me}", Role.GPU_WORKER, me, "ipc:///unused"))
        process = ProcessConfig(name="worker", bus=bus)
        config = WorkerConfig(process=process, model_path="m", kv_transfer=KVTransferConfig(**settings))
        self.transfers = WorkerTransfers(config, self.links, lambda: self.memory)
        self.landed: dict[int, list[int]] = {}
        self.failed: dict[int, list[int]] = {}
        self.ended: dict[int, list[KVLanded | KVSendEnded]] = {}  # each answer that a transfer has ended

    @property
    def geometry(self) -> Geometry:
        return self.transfers.describe(GEOMETRY)

    def turn(self) -> None:
        for answer in self.transfers.poll():
            if isinstance(answer, KVLanded):
                self.landed.setdefault(answer.transfer, []).extend(answer.blocks)
                self.failed.setdefault(answer.transfer, []).extend(answer.failed_blocks)
            if isinstance(answer, KVSendEnded) or answer.is_ended:
                self.ended.setdefault(answer.transfer, []).append(answer)

    def receive(self, number: int, source: int, blocks: list[int], generation: int = 1, ticket: bytes = b"") -> None:
        self.transfers.receive(KVReceive(number, source, generation, blocks, ticket))

    def send(self, send: KVSend) -> None:
        self.transfers.on_plan_done(plan_of(send))

    def is_complete(self, number: int) -> bool:
        (answer,) = self.ended[number]
        return isinstance(answer, KVSendEnded) and answer.is_complete


def send_to(
    target: Geometry,
    worker: int,
    number: int,
    blocks: list[int],
    target_blocks: list[int],
    is_last: bool = True,
    ticket: bytes = b"",
) -> KVSend:
    return KVSend(number, worker, target.kv_generation, target.kv_endpoint, blocks, target_blocks, is_last, ticket)


def plan_of(*sends: KVSend) -> StepPlan:
    return StepPlan(1, 1, [], [], [], [], sends=list(sends))


def until(condition: Callable[[], bool], *workers: KVWorker, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, [(worker.landed, worker.ended) for worker in workers]
        for worker in workers:
            worker.turn()
        time.sleep(0.0002)


class KVWorkerProcess:
    """A worker's transfers in a process of their own, which a test commands and kills."""

    def __init__(self, bus: BusConfig, me: int, connector: str) -> None:
        self.me = me
        self.pipe, theirs = forkserver().Pipe()
        arguments = (theirs, msgspec.msgpack.encode(bus), me, connector)
        self.process = forkserver().Process(target=run_worker, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(30)
        self.geometry = msgspec.msgpack.decode(self.pipe.recv(), type=Geometry)

    def tell(self, frame: KVReceive | KVAbort | StepPlan) -> None:
        self.pipe.send((type(frame).__name__, msgspec.msgpack.encode(frame)))


@contextmanager
def worker_process(bus: BusConfig, me: int, connector: str) -> Iterator[KVWorkerProcess]:
    worker = KVWorkerProcess(bus, me, connector)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.join()
        worker.process.close()
        worker.pipe.close()


FRAMES: dict[str, type[Any]] = {"KVReceive": KVReceive, "KVAbort": KVAbort, "StepPlan": StepPlan}


def run_worker(pipe: "Connection", bus: bytes, me: int, connector: str) -> None:
    settings = msgspec.msgpack.decode(bus, type=BusConfig)
    worker = KVWorker(settings, me, LARGE, NUM_BLOCKS, connector=connector)
    worker.memory.fill_random(me)
    pipe.send(msgspec.msgpack.encode(worker.geometry))
    while True:
        worker.turn()
        if pipe.poll(0.0005):
            name, data = pipe.recv()
            match msgspec.msgpack.decode(data, type=FRAMES[name]):
                case KVReceive() as frame:
                    worker.transfers.receive(frame)
                case KVAbort() as frame:
                    worker.transfers.abort(frame)
                case StepPlan() as plan:
                    worker.transfers.on_plan_done(plan)


def bus_at(folder: Path) -> BusConfig:
    return BusConfig(registry="ipc:///unused", bind=f"ipc://{folder}")
