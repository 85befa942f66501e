"""Quarantine for requests that may have broken a worker: each is run alone in its group, before other requests.

Only a worker that reports a failed device makes suspects: all requests of its unanswered plans. Killed workers and lost
links make none. A request is cleared when it has survived a prefill and a decode step. A request that runs alone when
another worker breaks is failed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.sequences.requests import Phase, Request, Sequence

log = logging.getLogger(__name__)

CLEARED_AFTER_TOKENS = 2  # one from a prefill and one from a decode step
MAX_WAIT_S = 60.0  # for an empty group; then groups admit nothing until one is empty


@dataclass(frozen=True, slots=True)
class Probation:
    request: Request
    goal: int  # output tokens with which the request is cleared
    since_s: float


class CrashQuarantine:
    def __init__(self) -> None:
        self.probations: dict[str, Probation] = {}  # by request

    def blame(self, group: WorkerGroup, detail: str, now: float, fail: Callable[[Sequence, str], None]) -> None:
        """The worker of a group broke: the requests of its plans go into quarantine.

        A request that ran alone and was in quarantine already is failed.
        """
        near = {one.request.id: one.request for one in group.in_flight_sequences() if one.phase is not Phase.ENDED}
        for request in sorted(near.values(), key=lambda request: request.arrival):
            if len(near) == 1 and request.id in self.probations:
                log.error("workers break where %s runs alone, it is failed: %s", request.id, detail)
                for sequence in list(request.sequences.values()):
                    fail(sequence, f"workers broke while they ran this request alone: {detail}")
            else:
                self.probations[request.id] = Probation(request, _num_outputs(request) + CLEARED_AFTER_TOKENS, now)

    def update(self) -> None:
        """Clears requests that have survived and drops ended ones. To be called before plans are built."""
        for probation in list(self.probations.values()):
            if not probation.request.sequences or _num_outputs(probation.request) >= probation.goal:
                del self.probations[probation.request.id]

    def next_for(self, group: WorkerGroup) -> Sequence | None:
        """The quarantined sequence to schedule in this group before all others, if only its request runs there."""
        tried = self._running(group)
        for probation in self.probations.values():
            if probation.request is tried or (tried is None and _alone(group, probation.request)):
                for sequence in probation.request.active_sequences:
                    # A sequence that waits for a result would keep the group empty until then.
                    if sequence.ticket and not sequence.is_set_aside and not sequence.awaits_results():
                        return sequence
        return None

    def may_run(self, group: WorkerGroup, request: Request, now: float) -> bool:
        """Whether a sequence of this request, which is next, may be scheduled in this group."""
        tried = self._running(group)
        if request.id in self.probations:
            return tried in (None, request) and _alone(group, request)
        if tried is not None:
            return False
        waits = [probation for probation in self.probations.values() if _waits(probation.request)]
        return not waits or (bool(group.running) and all(now - probation.since_s < MAX_WAIT_S for probation in waits))

    def _running(self, group: WorkerGroup) -> Request | None:
        running = [*(one.sequence for one in group.running), *(one.sequence for one in group.packed_in_flight())]
        requests = (sequence.request for sequence in running if sequence.phase is not Phase.ENDED)
        return next((request for request in requests if request.id in self.probations), None)


def _alone(group: WorkerGroup, request: Request) -> bool:
    """Whether no other request runs or has results to come."""
    running = (one.sequence for one in group.running)
    return all(sequence.request is request for sequence in (*running, *group.in_flight_sequences()))


def _waits(request: Request) -> bool:
    """Whether all live sequences of the request wait, and for no adapter. False if it has ended since `update`.

    An adapter's place may have to be left by other requests, which have to run for that.
    """
    if request.texts is not None and request.texts.in_flight:
        return False
    return bool(request.sequences) and all(
        sequence.phase is Phase.WAITING and not sequence.is_set_aside for sequence in request.active_sequences
    )


def _num_outputs(request: Request) -> int:
    return max((len(sequence.outputs) for sequence in request.active_sequences), default=0)
