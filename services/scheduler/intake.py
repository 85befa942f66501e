"""Requests as they come: new, doubled, sent again, cancelled, stopped, out of time."""

from blockyard.services.scheduler.admission import Admission
from blockyard.services.scheduler.deadlines import Deadlines
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.requests import Choice, Request, make_choice, num_ids
from blockyard.services.scheduler.streams import Streams
from blockyard.services.scheduler.waiting import WaitingQueue
from blockyard.shared import messages
from blockyard.shared.messages import Accepted, Cancel, FinishReason, Generate, Refused, Stop


class Intake:
    def __init__(
        self,
        admission: Admission,
        waiting: WaitingQueue,
        lifecycle: Lifecycle,
        streams: Streams,
        outbox: Outbox,
    ) -> None:
        self.num_requests = 0
        self.deadlines = Deadlines()
        self._admission, self._waiting, self._lifecycle = admission, waiting, lifecycle
        self._streams, self._outbox = streams, outbox
        self._arrivals = 0

    def generate(self, gateway: int, frame: Generate, now: float) -> None:
        """Answered with Accepted or Refused; with Accepted later if no detokenizer is alive."""
        request = self._lifecycle.requests.get(frame.request_id)
        if request is not None and frame.attempt <= request.attempt:
            if frame.attempt == request.attempt and request.accepted:
                self._accept(request)  # sent twice, answered twice
            return
        refusal = self._admission.refuse(frame)
        if refusal is not None:
            if request is not None:
                self._lifecycle.drop(request)
            room = self._waiting.room()
            self._outbox.answer(
                gateway,
                Refused(frame.request_id, frame.attempt, refusal.status, refusal.field, refusal.message, room),
            )
            return
        going_on = self._going_on(request, frame)
        if request is not None and going_on:
            self._rebind(request, gateway, frame, going_on)
        else:
            self._start(request, gateway, frame)
        if frame.deadline_s is not None:
            self.deadlines.add(now + frame.deadline_s, frame.request_id, frame.attempt)

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
        for request_id, attempt in self.deadlines.pop_due(now):
            request = self._lifecycle.requests.get(request_id)
            if request is None or request.attempt != attempt:
                continue
            text = f"not done within the deadline of {request.frame.deadline_s} s"
            if request.accepted:
                for choice in list(request.choices.values()):
                    self._lifecycle.conclude(choice, FinishReason.FAILED, text)
            else:
                room = self._waiting.room()
                self._outbox.answer(request.gateway, Refused(request_id, attempt, 504, "deadline_s", text, room))
                self._lifecycle.drop(request)

    def detokenizer_joined(self) -> None:
        """Those who came while there was none are accepted now."""
        for request in self._lifecycle.requests.values():
            if not request.accepted:
                self._bind(request)

    def _going_on(self, request: Request | None, frame: Generate) -> dict[int, messages.Choice]:
        """The listed choices that only need a new stream. None do while no detokenizer could open it."""
        if request is None or not request.accepted or not len(self._streams):
            return {}
        listed = {c.index: c for c in frame.choices}
        return {
            index: listed[index]
            for index, choice in request.choices.items()
            if index in listed and _continues(choice, listed[index].output_ids)
        }

    def _start(self, old: Request | None, gateway: int, frame: Generate) -> None:
        """A request from the ids it brings, in the place in the queue that it had."""
        if old is not None:
            self._lifecycle.drop(old)
        else:
            self.num_requests += 1
            self._arrivals += 1
        arrival = old.arrival if old is not None else self._arrivals
        request = Request(frame.request_id, frame.attempt, frame, gateway, arrival, num_ids(frame.prompt_ids))
        self._lifecycle.requests[request.id] = request
        for choice in frame.choices:
            self._add_choice(request, choice)
        self._bind(request)

    def _rebind(self, request: Request, gateway: int, frame: Generate, going_on: dict[int, messages.Choice]) -> None:
        """A live request gets a new stream; its choices run on, or start from the ids they bring."""
        self._streams.unbind(request)
        for choice in list(request.choices.values()):
            if choice.index not in going_on:
                self._lifecycle.end(choice)
        request.attempt, request.frame, request.gateway = frame.attempt, frame, gateway
        for listed in frame.choices:
            if listed.index not in going_on:
                self._add_choice(request, listed)
        self._bind(request)
        for index, listed in going_on.items():
            self._streams.catch_up(request.choices[index], num_ids(listed.output_ids))

    def _add_choice(self, request: Request, listed: messages.Choice) -> None:
        choice = make_choice(request, listed.index, listed.output_ids)
        request.choices[listed.index] = choice
        self._waiting.push(choice)

    def _bind(self, request: Request) -> None:
        if self._streams.bind(request, request.frame.choices):
            request.accepted = True
            self._accept(request)

    def _accept(self, request: Request) -> None:
        room = self._waiting.room()
        self._outbox.answer(request.gateway, Accepted(request.id, request.attempt, request.detokenizer, room))


def _continues(choice: Choice, output_ids: bytes) -> bool:
    """Whether what the gateway has is the beginning of what is known, with nothing forgotten between."""
    num_delivered = num_ids(output_ids)
    if num_delivered > len(choice.outputs) or choice.outputs[:num_delivered].tobytes() != output_ids:
        return False
    return choice.request.frame.sampling.num_logprobs is None or num_delivered >= choice.logprobs_from
