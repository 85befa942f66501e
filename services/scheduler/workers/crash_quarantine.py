"""Requests whose work may have broken a worker. They are tried one at a time, each alone in its group, before others.

Only a worker that says that its device failed makes suspects: of everything in the plans that it had not answered. A
worker that is killed, or whose link is lost, makes none. Whoever survives a prefill and a decode step is one no more;
whoever is alone when a worker breaks once more has done it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blockyard.services.scheduler.sequences.requests import Phase, Request, Sequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup

log = logging.getLogger(__name__)

CLEARED_AFTER_TOKENS = 2  # new tokens: one of a prefill, one of a decode step
MAX_WAIT_S = 60.0  # that a suspect waits for a group where nothing runs, before groups are emptied for it


@dataclass(frozen=True, slots=True)
class Probation:
    request: Request
    goal: int  # outputs with which it is cleared
    since_s: float


class CrashQuarantine:
    def __init__(self) -> None:
        self._probations: dict[str, Probation] = {}  # by request

    def __bool__(self) -> bool:
        return bool(self._probations)

    def blame(self, group: WorkerGroup, detail: str, now: float, fail: Callable[[Sequence, str], None]) -> None:
        """The worker of this group broke. Who ran alone, and was suspected before, has done it and is failed."""
        active = (running.sequence for record in group.in_flight for running in record.all_sequences())
        near = {sequence.request.id: sequence.request for sequence in active if sequence.phase is not Phase.ENDED}
        for request in sorted(near.values(), key=lambda request: request.arrival):
            if len(near) == 1 and request.id in self._probations:
                log.error("workers break where %s runs alone, it is failed: %s", request.id, detail)
                for sequence in list(request.sequences.values()):
                    fail(sequence, f"workers broke while they ran this request alone: {detail}")
            else:
                self._probations[request.id] = Probation(request, _num_outputs(request) + CLEARED_AFTER_TOKENS, now)

    def update(self) -> None:
        """Before plans are made: clears whoever has survived, and forgets those that ended."""
        for probation in list(self._probations.values()):
            if not probation.request.sequences or _num_outputs(probation.request) >= probation.goal:
                del self._probations[probation.request.id]

    def next_for(self, group: WorkerGroup) -> Sequence | None:
        """The suspect that is to be seated in this group now, before everybody else: where none of the others runs."""
        tried = self._running(group)
        for probation in self._probations.values():
            if probation.request is tried or (tried is None and _alone(group, probation.request)):
                for sequence in probation.request.active_sequences:
                    # A preempted one whose last result is still due would keep the group empty until it is in.
                    if sequence.ticket and not sequence.is_held and not sequence.awaits_results():
                        return sequence
        return None

    def may_run(self, group: WorkerGroup, request: Request, now: float) -> bool:
        """Whether a choice that is next may be seated here."""
        tried = self._running(group)
        if request.id in self._probations:
            return tried in (None, request) and _alone(group, request)
        if tried is not None:
            return False
        waits = [probation for probation in self._probations.values() if _waits(probation.request)]
        return not waits or (bool(group.running) and all(now - probation.since_s < MAX_WAIT_S for probation in waits))

    def _running(self, group: WorkerGroup) -> Request | None:
        """The suspect that is tried in this group."""
        requests = (running.sequence.request for running in group.running)
        return next((request for request in requests if request.id in self._probations), None)


def _alone(group: WorkerGroup, request: Request) -> bool:
    """Nobody else runs, or may still run."""
    return all(running.sequence.request is request for running in group.active())


def _waits(request: Request) -> bool:
    """All that is left of it waits. A request that has ended since `settle` has nothing left."""
    return bool(request.sequences) and all(sequence.phase is Phase.WAITING for sequence in request.active_sequences)


def _num_outputs(request: Request) -> int:
    active_sequences: Iterable[Sequence] = request.active_sequences
    return max((len(sequence.outputs) for sequence in active_sequences), default=0)
