"""Assigns requests to detokenizers and writes the frames that open, close and resume their text streams."""

from collections.abc import Iterable, Mapping

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.outbox import DetokenizerOutbox
from blockyard.services.scheduler.sequences.requests import Request, Sequence
from blockyard.shared import messages
from blockyard.shared.messages import Cancel, FinishReason, StreamOpen, TokenStep
from blockyard.shared.token_ids import ID_BYTES

MAX_LEFT = 8
MOST_STREAMS = 0xFFFFFFFE  # stream numbers have 32 bits
CONTEXT_IDS = 8  # last prompt ids, which a detokenizer needs to decode the first output ids


class DetokenizerStreams:
    def __init__(self, groups: Mapping[int, WorkerGroup]) -> None:
        """`groups` by worker."""
        self._groups = groups
        self._stream = 0  # number of the last one
        self.text_outboxes: dict[int, DetokenizerOutbox] = {}
        self._open_at_loss: dict[int, list[Cancel]] = {}  # streams of detokenizers that were lost lately
        self._lost: list[int] = []  # lost detokenizers that gateways are not told of yet

    def can_open(self, request: Request) -> bool:
        """Whether `open` would succeed."""
        return not request.has_text or bool(self.text_outboxes)

    def add_detokenizer(self, incarnation: int) -> None:
        """A detokenizer that returns lost only its link: its old streams are closed."""
        if incarnation not in self.text_outboxes:
            text_outbox = self.text_outboxes[incarnation] = DetokenizerOutbox(incarnation)
            text_outbox.close_streams(self._open_at_loss.pop(incarnation, []))

    def remove_detokenizer(self, incarnation: int, requests: Iterable[Request]) -> None:
        """A detokenizer was lost. Its requests continue; their gateways send them again with the ids they have."""
        text_outbox = self.text_outboxes.pop(incarnation, None)
        if text_outbox is None:
            return
        self._lost.append(incarnation)
        bound = [request for request in requests if request.text_outbox is text_outbox]
        for request in bound:
            self._detach(request)
        self._open_at_loss[incarnation] = [Cancel(request.id, request.attempt) for request in bound]
        while len(self._open_at_loss) > MAX_LEFT:
            del self._open_at_loss[next(iter(self._open_at_loss))]

    def take_lost(self) -> list[int]:
        """Lost detokenizers to tell gateways of; none while no detokenizer is left to open new streams."""
        if not self.text_outboxes:
            return []
        lost, self._lost = self._lost, []
        return lost

    def open(self, request: Request, listed: list[messages.ChoiceState]) -> bool:
        """Opens a stream for each listed choice at the detokenizer with the fewest streams. False if none is alive.

        A request without text needs none.
        """
        options = request.frame.text
        if options is None:
            return True
        text_outbox = min(self.text_outboxes.values(), key=lambda s: s.num_streams, default=None)
        request.set_detokenizer(text_outbox)
        if text_outbox is None:
            return False
        context = request.frame.prompt_ids[-CONTEXT_IDS * ID_BYTES :]
        opens: list[StreamOpen] = []
        for choice in listed:
            stream = self._stream = self._stream % MOST_STREAMS + 1
            if choice.index in request.sequences:
                request.sequences[choice.index].stream = stream
            opens.append(
                StreamOpen(
                    request.id,
                    request.attempt,
                    choice.index,
                    request.gateway,
                    context,
                    choice.output_ids,
                    choice.chars_sent,
                    options,
                    stream,
                    request.num_added,
                    request.added_tokens,
                )
            )
        text_outbox.open_streams(opens)
        return True

    def close(self, request: Request) -> None:
        text_outbox = request.text_outbox
        if text_outbox is not None:
            text_outbox.close_streams([Cancel(request.id, request.attempt)], len(request.sequences))
            self._detach(request)

    def _detach(self, request: Request) -> None:
        for sequence in request.sequences.values():
            sequence.stream = 0
            if sequence.last_run is not None and (group := self._groups.get(sequence.last_run.worker)) is not None:
                group.detach_from_batch(sequence.last_run)
        request.set_detokenizer(None)

    def resend(self, sequence: Sequence, num_delivered: int) -> None:
        """Sends a new stream the ids that the gateway lacks, without their log-probabilities, which are not kept."""
        text_outbox = sequence.request.text_outbox
        ids = sequence.outputs[num_delivered:].tolist()
        if text_outbox is not None and ids:
            text_outbox.add_step(
                TokenStep(
                    sequence.request.id,
                    sequence.request.attempt,
                    sequence.index,
                    num_delivered,
                    ids,
                    cached_tokens=0 if num_delivered else sequence.reported_cached_tokens,
                    queued_s=None if num_delivered else sequence.queued_s,
                )
            )

    def finish(self, sequence: Sequence, finish: FinishReason, detail: str, status: int) -> None:
        """Sends a final step without tokens."""
        request = sequence.request
        if request.text_outbox is not None:
            request.text_outbox.add_step(
                TokenStep(
                    request.id,
                    request.attempt,
                    sequence.index,
                    len(sequence.outputs),
                    [],
                    finish,
                    detail=detail,
                    status=status,
                )
            )

    def end_batches(self) -> None:
        """Called when a second result of a worker arrives before the next step."""
        for text_outbox in self.text_outboxes.values():
            text_outbox.end_batch()
