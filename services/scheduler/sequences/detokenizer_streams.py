"""Which detokenizer makes a request's text, and what each gets at the end of a turn."""

from collections.abc import Iterable

from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.sequences.detokenizer_outbox import TextSink
from blockyard.services.scheduler.sequences.requests import ID_BYTES, Choice, Request
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup
from blockyard.shared import messages
from blockyard.shared.messages import Cancel, FinishReason, StreamOpen, TokenStep

MAX_LEFT = 8
MOST_STREAMS = 0xFFFFFFFE  # that are told apart: they are called by 32 bits
CONTEXT_IDS = 8  # ids of the prompt's end that a detokenizer gets


class Streams:
    def __init__(self, groups: dict[int, WorkerGroup]) -> None:
        """`groups` by worker."""
        self._groups = groups
        self._stream = 0  # what the last one is called
        self._sinks: dict[int, TextSink] = {}
        self._left: dict[int, list[Cancel]] = {}  # what those that left lately had open
        self._lost: list[int] = []  # detokenizers whose link broke, until gateways may be told

    def __len__(self) -> int:
        return len(self._sinks)

    def join(self, incarnation: int) -> None:
        """One that returns lost only its link: it still has streams that nobody will continue."""
        if incarnation not in self._sinks:
            self._sinks[incarnation] = TextSink(incarnation)
            self._sinks[incarnation].closes += self._left.pop(incarnation, [])

    def leave(self, incarnation: int, requests: Iterable[Request]) -> None:
        """A member is gone. Its requests go on; their gateways, once told, will say where their text broke off."""
        sink = self._sinks.pop(incarnation, None)
        if sink is None:
            return
        self._lost.append(incarnation)
        bound = [request for request in requests if request.sink is sink]
        for request in bound:
            self._unbound(request)
        self._left[incarnation] = [Cancel(request.id, request.attempt) for request in bound]
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    def take_lost(self) -> list[int]:
        """Detokenizers to name to the gateways in PathLost: none while no detokenizer could open new streams."""
        if not self._sinks:
            return []
        lost, self._lost = self._lost, []
        return lost

    def bind(self, request: Request, listed: list[messages.ChoiceState]) -> bool:
        """Opens a stream for each listed choice at the detokenizer with the fewest. False if none is alive."""
        sink = min(self._sinks.values(), key=lambda s: s.num_streams, default=None)
        request.sink = sink
        if sink is None:
            return False
        request.detokenizer = sink.incarnation
        context = request.frame.prompt_ids[-CONTEXT_IDS * ID_BYTES :]
        for choice in listed:
            stream = self._stream = self._stream % MOST_STREAMS + 1
            if choice.index in request.choices:
                request.choices[choice.index].stream = stream
            sink.opens.append(
                StreamOpen(
                    request.id,
                    request.attempt,
                    choice.index,
                    request.gateway,
                    context,
                    choice.output_ids,
                    choice.chars_sent,
                    request.frame.text,
                    stream,
                )
            )
        sink.num_streams += len(listed)
        return True

    def unbind(self, request: Request) -> None:
        """Closes what the request has open."""
        sink = request.sink
        if sink is not None:
            sink.closes.append(Cancel(request.id, request.attempt))
            sink.num_streams -= len(request.choices)
            self._unbound(request)

    def _unbound(self, request: Request) -> None:
        for choice in request.choices.values():
            choice.stream = 0
            if choice.seat is not None and (group := self._groups.get(choice.seat.worker)) is not None:
                group.detach_from_batch(choice.seat)
        request.sink = None

    def catch_up(self, choice: Choice, num_delivered: int) -> None:
        """Sends a newly bound stream the ids beyond those its gateway has. Log-probabilities are not kept."""
        sink = choice.request.sink
        ids = choice.outputs[num_delivered:].tolist()
        if sink is not None and ids:
            sink.steps.append(
                TokenStep(
                    choice.request.id,
                    choice.request.attempt,
                    choice.index,
                    num_delivered,
                    ids,
                    cached_tokens=0 if num_delivered else choice.told_cached,
                    queued_s=None if num_delivered else choice.queued_s,
                )
            )

    def conclude(self, choice: Choice, finish: FinishReason, detail: str = "") -> None:
        """A final step without tokens."""
        request = choice.request
        if request.sink is not None:
            request.sink.steps.append(
                TokenStep(request.id, request.attempt, choice.index, len(choice.outputs), [], finish, detail=detail)
            )

    def flush(self, outbox: Outbox) -> None:
        for sink in self._sinks.values():
            for batch in sink.take():
                outbox.send(sink.incarnation, batch)

    def seal(self) -> None:
        """Another result of a worker has come in the same turn."""
        for sink in self._sinks.values():
            sink.seal()
