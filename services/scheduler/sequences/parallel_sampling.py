"""Choices of one request compute their prompt once.

The first of them, the leader, goes ahead; the others are parked until a plan that writes the last of its prompt has
been sent. Plans run in order, so that a later one may read it: each of the others shares the full blocks by count, its
worker copies the block that the prompt ends in, and it computes the prompt's last token itself, because it draws its
own token from there.
"""

from collections.abc import Iterable

from blockyard.services.scheduler.batch.plan_record import PlanRecord
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Choice, Phase, Request, Seat
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup


class Forks:
    """Holds back the choices that are better started later; says what those that start can begin with."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.num_parked = 0
        self._waiting = waiting

    def add(self, request: Request, choices: Iterable[Choice]) -> None:
        """These wait from now on, each in the queue or parked."""
        for choice in choices:
            if choice.fork_of is None and request.num_prompt > 1 and any(_leads(other) for other in request.members):
                self._park(choice)
            else:
                self._waiting.push(choice)

    def written(self, request: Request) -> None:
        """The plan that writes the last of one choice's prompt has been sent: the others may begin."""
        parked, request.parked = request.parked, []
        self.num_parked -= len(parked)
        for choice in parked:
            self._waiting.unpark(choice)
            self._waiting.push(choice)

    def left(self, choice: Choice) -> None:
        """A choice has ended. If it was the leader, in the middle of its prompt, the next one takes over."""
        request = choice.request
        if not request.parked:
            return
        if choice in request.parked:
            request.parked.remove(choice)
            self._waiting.unpark(choice)
            self.num_parked -= 1
        elif not any(_leads(other) for other in request.members):
            leader = request.parked.pop(0)
            self._waiting.unpark(leader)
            self._waiting.push(leader)
            self.num_parked -= 1

    def find(self, group: WorkerGroup, record: PlanRecord, choice: Choice, found: PrefixMatch) -> PrefixMatch | None:
        """What a choice may begin with in this plan; None if it has been parked: a sibling is at its prompt.

        `found` is what there is of it without siblings.
        """
        request = choice.request
        if choice.fork_of is not None and _has(choice.fork_of, group, record, choice.known - 1):
            return self._fork(group, choice, choice.fork_of, choice.known - 1)
        num_tokens = min(request.num_prompt, choice.known - 1)
        if len(request.members) < 2 or num_tokens <= found.num_tokens:
            return found
        is_near = False
        scored = request.frame.sampling.num_prompt_logprobs is not None
        for other in request.members:
            seat = other.seat
            if seat is None or not _runs(seat, group):
                continue
            if seat.num_freed > group.window.num_skipped_blocks(num_tokens):
                continue  # it has given up what this one would have to see
            if scored and (seat.num_found or seat.copied_from is not None):
                continue  # a fork itself: nobody may be left who has the log-probabilities of the prompt
            if _has(seat, group, record, num_tokens):
                return self._fork(group, choice, seat, num_tokens)
            is_near = True
        if not is_near or num_tokens - found.num_tokens < group.blocks.block_size:
            return found
        self._waiting.discard(choice)
        self._park(choice)
        return None

    def _park(self, choice: Choice) -> None:
        choice.request.parked.append(choice)
        self._waiting.park(choice)
        self.num_parked += 1

    def _fork(self, group: WorkerGroup, choice: Choice, source: Seat, num_tokens: int) -> PrefixMatch:
        num_full, rest = divmod(num_tokens, group.blocks.block_size)
        if choice.num_cached is None:
            choice.num_cached = source.choice.num_cached  # one prompt, found once
        first = group.window.num_skipped_blocks(num_tokens)
        copied = source.blocks[num_full] if rest else None
        return PrefixMatch(source.blocks[first:num_full], num_tokens=num_tokens, copy_from=copied, num_skipped=first)


def _runs(seat: Seat, group: WorkerGroup) -> bool:
    return seat.worker == group.worker and seat.choice.seat is seat and seat.choice.phase is Phase.RUNNING


def _has(seat: Seat, group: WorkerGroup, record: PlanRecord, num_tokens: int) -> bool:
    """Whether a seat's KV is written that far when this plan begins, and it still holds what is seen from there.

    The seat may be new in this plan: then the block that it ends in is filled by a copy of this plan, and a reader
    copies that one's source (see `Draft.source_of`).
    """
    if not _runs(seat, group) or seat.num_freed > group.window.num_skipped_blocks(num_tokens):
        return False
    return seat.granted - record.granted(seat) >= num_tokens


def _leads(choice: Choice) -> bool:
    """It will write the prompt, and a plan that does has not been sent."""
    if choice.phase is Phase.RUNNING:
        return choice.seat is not None and choice.seat.granted < choice.seat.prefill_end
    return bool(choice.ticket)
