"""A leader's side of the other replicas that have the experts of its model. No torch.

Their leaders agree on each step over a pipe to each other. A replica that ends, or is silent for 4 s, ends all.
"""

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from blockyard.services.gpu_worker.parallel.commands import RankFailed, Sign
from blockyard.services.gpu_worker.parallel.replicas import Connect, ReplicaRanks, StepOffer
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.ranks.replica_meeting import MetReplicas
from blockyard.services.gpu_worker.ranks.signs import ENDED, RankSigns
from blockyard.shared.errors import BlockyardError, RankLostError
from blockyard.shared.process.frame_pipe import FramePipe

if TYPE_CHECKING:
    from blockyard.services.gpu_worker.parallel.rank_group import RankGroup

LEADER = 0

OnEnd = Callable[[BlockyardError], None]


class ReplicaTeam:
    """Implements `StepAgreement`. Every replica offers each step once, and all see the same offers."""

    def __init__(self, replica: Shard, met: MetReplicas, on_end: OnEnd) -> None:
        """on_end: called in a thread when a replica is gone; must end this process."""
        self.folder, self.store = met.folder, met.store
        self._replica, self._on_end, self._pids = replica, on_end, met.pids
        self._pipes = {other: FramePipe[StepOffer](both[0], StepOffer) for other, both in met.sockets.items()}
        self._offers: dict[int, deque[StepOffer]] = {other: deque() for other in self._pipes}  # of steps to come
        self._ranks = ReplicaRanks(met.meeting, replica, LEADER)
        self._signs = {other: FramePipe[Sign](both[1], Sign) for other, both in met.sockets.items()}
        self._watch = RankSigns(self._signs, self._lost)
        self._watch.start()

    def connect(self, connect: Connect) -> "RankGroup":
        return self._ranks.connect(connect)

    def connect_stage(self, connect: Connect, shard: Shard, stage: int) -> "RankGroup":
        return self._ranks.connect_stage(connect, shard, stage)

    @property
    def sources(self) -> list[int]:
        """What is readable when another replica has offered a step, or is gone."""
        return [source for pipe in self._pipes.values() for source in pipe.sources]

    @property
    def is_called(self) -> bool:
        for other, pipe in self._pipes.items():
            while pipe.is_readable:
                self._read(other)
        return any(self._offers.values())

    def agree(self, offer: StepOffer) -> list[StepOffer]:
        for other, pipe in self._pipes.items():
            try:
                pipe.send(offer)
            except OSError as e:
                raise RankLostError(f"replica {other} takes no offers: {e.strerror or e}") from e
        found = []
        for replica in range(self._replica.size):
            if replica == self._replica.rank:
                found.append(offer)
                continue
            while not self._offers[replica]:
                self._read(replica)
            found.append(self._offers[replica].popleft())
        return found

    def _read(self, replica: int) -> None:
        """Waits for an offer."""
        offer = self._pipes[replica].receive()
        if offer is None:
            raise RankLostError(f"replica {replica} has ended")
        self._offers[replica].append(offer)

    def serve(self) -> None:
        """The start is over."""
        self._watch.serve()

    def close(self) -> None:
        """The others end."""
        self._watch.stop()
        for other, pipe in self._pipes.items():
            pipe.close()
            self._signs[other].close()

    def _lost(self, replica: int, what: str, failed: RankFailed | None) -> None:
        if what != ENDED:  # it may be stopped: its launcher starts another
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[replica], signal.SIGKILL)
        self._on_end(RankLostError(f"replica {replica} of {self._replica.size} {what}; all replicas end"))
