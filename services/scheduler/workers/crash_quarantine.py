"""Requests whose work may have broken a worker. They are tried one at a time, each alone in its group, before others.

Only a worker that says that its device failed makes suspects: of everything in the plans that it had not answered. A
worker that is killed, or whose link is lost, makes none. Whoever survives a prefill and a decode step is one no more;
whoever is alone when a worker breaks once more has done it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blockyard.services.scheduler.sequences.requests import Choice, Phase, Request
from blockyard.services.scheduler.workers.worker_groups import Group

log = logging.getLogger(__name__)

PROOF = 2  # new tokens: one of a prefill, one of a decode step
PATIENCE_S = 60.0  # that a suspect waits for a group where nothing runs, before groups are emptied for it


@dataclass(frozen=True, slots=True)
class Trial:
    request: Request
    goal: int  # outputs with which it is cleared
    since_s: float


class Suspects:
    def __init__(self) -> None:
        self._trials: dict[str, Trial] = {}  # by request

    def __bool__(self) -> bool:
        return bool(self._trials)

    def accuse(self, group: Group, detail: str, now: float, fail: Callable[[Choice, str], None]) -> None:
        """The worker of this group broke. Who ran alone, and was suspected before, has done it and is failed."""
        running = (seat.choice for record in group.flight for seat in record.all_seats())
        near = {choice.request.id: choice.request for choice in running if choice.phase is not Phase.ENDED}
        for request in sorted(near.values(), key=lambda request: request.arrival):
            if len(near) == 1 and request.id in self._trials:
                log.error("workers break where %s runs alone, it is failed: %s", request.id, detail)
                for choice in list(request.choices.values()):
                    fail(choice, f"workers broke while they ran this request alone: {detail}")
            else:
                self._trials[request.id] = Trial(request, _num_outputs(request) + PROOF, now)

    def settle(self) -> None:
        """Before plans are made: clears whoever has survived, and forgets those that ended."""
        for trial in list(self._trials.values()):
            if not trial.request.choices or _num_outputs(trial.request) >= trial.goal:
                del self._trials[trial.request.id]

    def next(self, group: Group) -> Choice | None:
        """The suspect that is to be seated in this group now, before everybody else: where none of the others runs."""
        tried = self._running(group)
        for trial in self._trials.values():
            if trial.request is tried or (tried is None and _alone(group, trial.request)):
                waiting = (choice for choice in trial.request.members if choice.ticket and not choice.aside)
                if (choice := next(waiting, None)) is not None:
                    return choice
        return None

    def admit(self, group: Group, request: Request, now: float) -> bool:
        """Whether a choice that is next may be seated here."""
        tried = self._running(group)
        if request.id in self._trials:
            return tried in (None, request) and _alone(group, request)
        if tried is not None:
            return False
        waits = [trial for trial in self._trials.values() if _waits(trial.request)]
        return not waits or (bool(group.running) and all(now - trial.since_s < PATIENCE_S for trial in waits))

    def _running(self, group: Group) -> Request | None:
        """The suspect that is tried in this group."""
        requests = (seat.choice.request for seat in group.running)
        return next((request for request in requests if request.id in self._trials), None)


def _alone(group: Group, request: Request) -> bool:
    """Nobody else runs, or may still run."""
    seats = [*group.running, *(seat for record in group.flight for seat in record.all_seats())]
    return all(seat.choice.request is request for seat in seats)


def _waits(request: Request) -> bool:
    """All that is left of it waits. A request that has ended since `settle` has nothing left."""
    return bool(request.choices) and all(choice.phase is Phase.WAITING for choice in request.members)


def _num_outputs(request: Request) -> int:
    members: Iterable[Choice] = request.members
    return max((len(choice.outputs) for choice in members), default=0)
