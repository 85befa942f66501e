"""The scheduler's core and workers with roles in one process: all but the ring's links is real."""

import time
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
from fake_links import FakeLinks
from kv_workers import bus_at
from token_rows import steps_of

from blockyard.services.gpu_worker.interfaces import OffloadableRunner
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.service import Worker
from blockyard.services.gpu_worker.transfers.group_transfers import TransferFollowers
from blockyard.services.gpu_worker.transfers.worker_transfers import WorkerTransfers
from blockyard.services.scheduler.batch.worker_groups import BatchLimits
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.services.scheduler.transfers.ledger import TransferLedger
from blockyard.shared.bus.member_list import Gone
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import (
    ChoiceState,
    FinishReason,
    Frame,
    Generate,
    Member,
    Role,
    Sampling,
    Stats,
    StreamOpen,
    TextOptions,
    TokenBatch,
    WorkerIn,
)

ME, DETOKENIZER, GATEWAY, WORKER = 1, 2, 3, 100
LIMIT_S = 60.0


class LoopLinks(FakeLinks):
    """Answers go to the scheduler at once."""

    def __init__(self, loop: "RoleLoop", me: Member) -> None:
        super().__init__(me)
        self._loop = loop

    def answer(self, to: int, frame: Frame) -> bool:
        if to == ME and self.me.incarnation in self._loop.workers:
            self._loop.core.on_message(self.me.incarnation, frame, time.monotonic())
        return True


class RoleLoop:
    """`outputs` and `finishes` by request and choice."""

    def __init__(
        self, folder: Path, max_num_seqs: int = 8, chunk: int = 64, depth: int = 1, **settings: object
    ) -> None:
        self.bus = bus_at(folder)
        self.workers: dict[int, Worker] = {}
        self.members: dict[int, Member] = {}  # of workers, also of lost ones
        self.runners: dict[int, SleepingRunner] = {}
        self.transfers: dict[int, WorkerTransfers] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.finishes: dict[tuple[str, int], FinishReason] = {}
        self.details: list[str] = []
        self.num_asked = 0
        self._streams: dict[int, StreamOpen] = {}
        batch = BatchLimits(max_num_seqs, chunk, depth)
        self.core = Scheduler(
            ME,
            SchedulerSettings(
                names=["m"], root="", batch=batch, max_queue_len=10**6, max_queue_tokens=10**9, **settings
            ),
            0,
        )
        self.core.on_member(Member("detokenizer", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)

    @property
    def ledger(self) -> TransferLedger:
        return self.core.ledger

    def add_worker(
        self,
        config: WorkerConfig,
        start: Callable[[WorkerConfig], OffloadableRunner],
        followers: TransferFollowers | None = None,
    ) -> int:
        incarnation = WORKER + len(self.workers)
        member = Member(f"gpu_worker {incarnation}", Role.GPU_WORKER, incarnation, "", ready=True)
        config = msgspec.structs.replace(config, process=msgspec.structs.replace(config.process, bus=self.bus))
        links, runner = LoopLinks(self, member), SleepingRunner(lambda: start(config), lambda: 0)
        transfers = WorkerTransfers(config, links, lambda: runner.kv_memory, followers)
        self.runners[incarnation], self.transfers[incarnation] = runner, transfers
        self.workers[incarnation], self.members[incarnation] = Worker(links, runner, transfers), member
        self.core.on_member(member, time.monotonic())
        self.turn()
        return incarnation

    def lose(self, worker: int) -> None:
        """A worker dies: its sockets are closed, and all others hear of it."""
        del self.workers[worker]
        self.transfers.pop(worker).close()
        self.core.on_member_lost(worker)
        for other in self.workers.values():
            other.session.handle(worker, Gone(self.members[worker]))

    def add(self, name: str, prompt: list[int], sampling: Sampling, n: int = 1, **more: object) -> None:
        self.num_asked += n
        choices = [ChoiceState(i) for i in range(n)]
        frame = Generate(name, 0, "m", array("I", prompt).tobytes(), b"", sampling, TextOptions(), choices, **more)
        self.core.on_message(GATEWAY, frame, time.monotonic())

    def run(self) -> Stats:
        """Runs until each choice has ended and no worker has an open transfer."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.finishes) < self.num_asked or self._open_transfers():
            assert time.monotonic() < deadline, (len(self.finishes), self._open_transfers())
            self.turn()
        self.turn()
        return self.core.stats()

    def turn(self) -> None:
        """Sends what the scheduler has to send, and lets each worker run a plan and move blocks."""
        for outgoing in self.core.step(time.monotonic()):
            if outgoing.to in self.workers:
                frame: WorkerIn = outgoing.frame
                self.workers[outgoing.to].session.handle(ME, frame)
            elif isinstance(outgoing.frame, TokenBatch):
                self._read(outgoing.frame)
        for incarnation, worker in list(self.workers.items()):
            worker.move_blocks(self.transfers[incarnation])
            worker.step()

    def close(self) -> None:
        for transfers in self.transfers.values():
            transfers.close()

    def _open_transfers(self) -> dict[int, int]:
        """By worker, and the scheduler's own."""
        counts = {worker: transfers.num_open for worker, transfers in self.transfers.items()}
        counts[ME] = len(self.ledger.transfers)
        return {key: count for key, count in counts.items() if count}

    def _read(self, frame: TokenBatch) -> None:
        for step in steps_of(frame, self._streams):
            place = (step.request_id, step.choice)
            self.details += [step.detail] if step.detail else []
            ids = self.outputs.setdefault(place, [])
            assert step.first == len(ids), "tokens come in order, none twice"
            ids += array("I", step.token_ids)
            if step.finish is not None:
                assert place not in self.finishes
                self.finishes[place] = step.finish
