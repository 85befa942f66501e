"""Requests as they come: new, doubled, sent again, cancelled, stopped."""

from collections import Counter

from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.acceptance import Acceptance
from blockyard.services.scheduler.queue.admission import Admission, Refusal
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.beam_sequences import Beams
from blockyard.services.scheduler.sequences.detokenizer_streams import Streams
from blockyard.services.scheduler.sequences.parallel_sampling import Forks
from blockyard.services.scheduler.sequences.requests import Amount, Choice, Request, make_choice, num_ids
from blockyard.shared import messages
from blockyard.shared.messages import Cancel, Generate, PathLost, Refused, Stop

QUEUE_FULL = Refusal(429, "", "the waiting queue is full")
ALL_ASLEEP = Refusal(503, "", "the workers sleep and the waiting queue is full")


class RequestHandler:
    def __init__(
        self,
        admission: Admission,
        waiting: WaitingQueue,
        bounds: QueueBounds,
        lifecycle: Lifecycle,
        streams: Streams,
        outbox: Outbox,
        acceptance: Acceptance,
        forks: Forks,
        beams: Beams,
    ) -> None:
        self.num_requests = 0
        self.num_refused: Counter[str] = Counter()  # by reason
        self._admission, self._waiting, self._bounds, self._lifecycle = admission, waiting, bounds, lifecycle
        self._streams, self._outbox, self._acceptance = streams, outbox, acceptance
        self._forks, self._beams = forks, beams
        self._arrivals = 0

    def generate(self, gateway: int, frame: Generate, now: float) -> None:
        """Answered with Accepted or Refused, now or when it is known."""
        request = self._lifecycle.requests.get(frame.request_id)
        if request is not None and frame.attempt <= request.attempt:
            if frame.attempt == request.attempt and request.accepted:
                self._acceptance.notify(request)  # sent twice, answered twice
            return
        refusal = self._admission.validate(frame)
        if refusal is not None:
            if request is not None:
                self._lifecycle.drop(request)
            self._answer(gateway, frame.request_id, frame.attempt, refusal, "invalid")
            return
        if frame.attempt == 0 and not self._make_room(gateway, frame):  # a resubmitted one had its room before
            return
        resumable = self._resumable(request, frame)
        if request is not None and resumable:
            self._rebind(request, gateway, frame, resumable)
        else:
            self._start(request, gateway, frame, now)

    def on_message(self, peer: int, frame: Cancel | Stop | PathLost) -> None:
        """What gateways and detokenizers say of requests that are there."""
        match frame:
            case Cancel():
                self.cancel(frame)
            case Stop():
                self.stop(frame)
            case PathLost(gateway):  # which knows best what is missing
                self._outbox.answer(gateway, PathLost(peer))

    def cancel(self, frame: Cancel) -> None:
        request = self._lifecycle.requests.get(frame.request_id)
        if request is not None and request.attempt <= frame.attempt:
            self._lifecycle.drop(request)

    def stop(self, frame: Stop) -> None:
        """The detokenizer has written the final delta and forgotten the stream: nothing goes there any more."""
        for stream in frame.streams:
            request = self._lifecycle.requests.get(stream.request_id)
            if request is not None and request.attempt == stream.attempt:
                choice = request.choices.get(stream.choice)
                if choice is not None:
                    self._lifecycle.end(choice)

    def expire(self, now: float) -> None:
        for request in self._acceptance.expire(now):
            self._refuse(request, Refusal(503, "", "nobody could serve it in time"), "overdue")

    def _make_room(self, gateway: int, frame: Generate) -> bool:
        """Whether a newcomer may wait. If the queue is full either it is refused, or others are in its place."""
        owner = (frame.tenant, frame.user)
        num_choices = len(frame.choices) if frame.beam is None else frame.beam.width
        gone = self._bounds.make_room(owner, Amount(num_choices, num_choices * num_ids(frame.prompt_ids)))
        if gone is None:
            reason = "delay" if self._bounds.is_long() else "full"
            self._answer(
                gateway, frame.request_id, frame.attempt, ALL_ASLEEP if self._bounds.asleep else QUEUE_FULL, reason
            )
            return False
        for request in gone:
            self._refuse(request, QUEUE_FULL, "displaced")
        return True

    def _refuse(self, request: Request, refusal: Refusal, reason: str) -> None:
        """One that waits and that nothing was promised to."""
        self._lifecycle.drop(request)
        self._answer(request.gateway, request.id, request.attempt, refusal, reason)

    def _answer(self, gateway: int, request_id: str, attempt: int, refusal: Refusal, reason: str) -> None:
        self.num_refused[reason] += 1
        capacity = self._bounds.capacity()
        frame = Refused(request_id, attempt, refusal.status, refusal.field, refusal.message, capacity)
        self._outbox.answer(gateway, frame)

    def detokenizer_joined(self) -> None:
        """Those that were sent again while there was none are accepted now."""
        for request in self._lifecycle.requests.values():
            if request.attempt:
                self._acceptance.accept(request)

    def _resumable(self, request: Request | None, frame: Generate) -> dict[int, messages.ChoiceState]:
        """The listed choices that only need a new stream. None do while no detokenizer could open it."""
        if request is None or not request.accepted or not len(self._streams) or request.search is not None:
            return {}  # a beam search starts over
        listed = {c.index: c for c in frame.choices}
        return {
            index: listed[index]
            for index, choice in request.choices.items()
            if index in listed and _continues(choice, listed[index].output_ids)
        }

    def _start(self, old: Request | None, gateway: int, frame: Generate, now: float) -> None:
        """A request from the ids it brings, in the place in the queue that it had."""
        found = _num_cached(old)
        if old is not None:
            self._lifecycle.drop(old)
        else:
            self.num_requests += 1
            self._arrivals += 1
        arrival = old.arrival if old is not None else self._arrivals
        request = Request(frame.request_id, frame.attempt, frame, gateway, arrival, num_ids(frame.prompt_ids))
        request.came_s = old.came_s if old is not None else now
        request.owner = old.owner if old is not None else (frame.tenant, frame.user)
        self._lifecycle.requests[request.id] = request
        self._add_choices(request, frame.choices, found)
        self._acceptance.on_arrival(request, now)

    def _rebind(
        self, request: Request, gateway: int, frame: Generate, resumable: dict[int, messages.ChoiceState]
    ) -> None:
        """A live request gets a new stream; its choices run on, or start from the ids they bring."""
        self._streams.unbind(request)
        found = _num_cached(request)
        for choice in list(request.choices.values()):
            if choice.index not in resumable:
                self._lifecycle.end(choice)
        request.attempt, request.frame, request.gateway = frame.attempt, frame, gateway
        self._add_choices(request, [listed for listed in frame.choices if listed.index not in resumable], found)
        request.accepted = False
        self._acceptance.accept(request)
        for index, listed in resumable.items():
            self._streams.catch_up(request.choices[index], num_ids(listed.output_ids))

    def _add_choices(self, request: Request, listed: list[messages.ChoiceState], found: dict[int, int | None]) -> None:
        choices = [make_choice(request, one.index, one.output_ids, found.get(one.index)) for one in listed]
        request.choices |= {choice.index: choice for choice in choices}
        if request.frame.beam is None:
            self._forks.add(request, choices)
        else:
            self._beams.begin(request, request.frame.beam)


def _num_cached(request: Request | None) -> dict[int, int | None]:
    """How many prompt tokens each choice of an earlier attempt found, as far as they had seats."""
    return {} if request is None else {index: choice.num_cached for index, choice in request.choices.items()}


def _continues(choice: Choice, output_ids: bytes) -> bool:
    """Whether what the gateway has is the beginning of what is known, and all that it lacks can be sent again.

    Log-probabilities cannot: they are large and not kept here. What was not delivered of them is computed again.
    """
    num_delivered = num_ids(output_ids)
    if num_delivered > len(choice.outputs) or choice.outputs[:num_delivered].tobytes() != output_ids:
        return False
    sampling = choice.request.frame.sampling
    if sampling.num_prompt_logprobs is not None and not num_delivered and choice.prompt_next:
        return False
    return sampling.num_logprobs is None or num_delivered == len(choice.outputs)
