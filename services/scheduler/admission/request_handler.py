"""Handles requests from gateways: new ones, repeated ones, new attempts after a loss, and cancels."""

import math
from collections import Counter, deque

from blockyard.services.scheduler.admission.gateways import Gateways
from blockyard.services.scheduler.admission.model_limits import NO_ADAPTERS, ModelLimits, Refusal, RequestAdapters
from blockyard.services.scheduler.admission.pool_handler import PoolHandler
from blockyard.services.scheduler.lifecycle.beam_sequences import BeamScheduler
from blockyard.services.scheduler.lifecycle.detokenizer_streams import DetokenizerStreams
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.lifecycle.parallel_sampling import ParallelSampling
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds
from blockyard.services.scheduler.queue.waiting_queue import Owner, WaitingQueue
from blockyard.services.scheduler.sequences.pooled_requests import PooledRequest
from blockyard.services.scheduler.sequences.requests import QueueAmount, Request, Sequence, make_sequence
from blockyard.services.scheduler.sequences.transfer_params import TransferParams
from blockyard.shared import messages
from blockyard.shared.messages import Accepted, Cancel, Generate, PathLost, Pool, Refused, Stop
from blockyard.shared.token_ids import num_ids

MAX_SILENCE_S = 5.0  # without an answer, if no maximum delay is set
QUEUE_FULL = Refusal(429, "", "the waiting queue is full")
ALL_ASLEEP = Refusal(503, "", "the workers sleep and the waiting queue is full")


class Acceptance:
    """Accepts requests: when they are first scheduled, or after they have waited for a while.

    A request can be refused with a status code only before it is accepted, because a streaming client gets its status
    200 with Accepted. A later error would be an event in the stream.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        waiting: WaitingQueue,
        streams: DetokenizerStreams,
        bounds: QueueBounds,
        outbox: Outbox,
    ) -> None:
        self._lifecycle, self._waiting, self._streams = lifecycle, waiting, streams
        self._bounds, self._outbox = bounds, outbox
        self._refuses = bounds.max_delay_s is not None
        self._max_wait_s = MAX_SILENCE_S if bounds.max_delay_s is None else bounds.max_delay_s
        # time limit, id and attempt; not the request, which would keep the prompts of ended requests in memory
        self._pending: deque[tuple[float, str, int]] = deque()
        self.next_expiry_s = math.inf  # when to call `expire`

    def on_arrival(self, request: Request, now: float) -> None:
        """A request starts to wait. One that is sent again was accepted before, so that it is accepted at once."""
        if not request.attempt or not self.accept(request):
            self._pending.append((now + self._max_wait_s, request.id, request.attempt))
            self.next_expiry_s = self._pending[0][0]

    def accept_pool(self, pool: PooledRequest) -> None:
        """Notifies the gateway of a request with many prompts, once."""
        if not pool.accepted:
            pool.set_accepted()
            for request in pool.requests.values():
                self._waiting.on_accepted(request)
            self.notify_pool(pool)

    def notify_pool(self, pool: PooledRequest) -> None:
        self._outbox.answer(pool.gateway, Accepted(pool.id, pool.attempt, None, self._bounds.capacity()))

    def can_accept(self, request: Request) -> bool:
        """Whether the request has a detokenizer, can get one, or needs none."""
        return request.accepted or self._streams.can_open(request)

    def accept(self, request: Request) -> bool:
        """Opens the request's streams and notifies its gateway, once. False while there is no detokenizer."""
        if request.accepted:
            return True
        if request.pool is not None:
            self.accept_pool(self._lifecycle.pools[request.pool.id])
            return True
        if not self._streams.open(request, request.frame.choices):
            return False
        request.accepted = True
        self._waiting.on_accepted(request)
        self.notify(request)
        return True

    def notify(self, request: Request) -> None:
        capacity = self._bounds.capacity()
        self._outbox.answer(request.gateway, Accepted(request.id, request.attempt, request.detokenizer, capacity))

    def expire(self, now: float) -> list[Request]:
        """Requests to refuse after the maximum delay. Without a maximum they are accepted."""
        refused = []
        while self._pending and self._pending[0][0] <= now:
            _, request_id, attempt = self._pending.popleft()
            request = self._lifecycle.requests.get(request_id)
            if request is None or request.attempt != attempt or request.accepted:
                continue
            if self._refuses and not request.attempt and not request.is_batch_line:
                refused.append(request)
            elif not self.accept(request):
                self._pending.append((now + self._max_wait_s, request_id, attempt))
        self.next_expiry_s = self._pending[0][0] if self._pending else math.inf
        return refused


class RequestHandler:
    """Every request that arrives here is answered with Accepted or Refused."""

    def __init__(
        self,
        model_limits: ModelLimits,
        bounds: QueueBounds,
        acceptance: Acceptance,
        gateways: Gateways,
        lifecycle: Lifecycle,
        waiting: WaitingQueue,
        parallel_sampling: ParallelSampling,
        beam_scheduler: BeamScheduler,
        streams: DetokenizerStreams,
        outbox: Outbox,
    ) -> None:
        self.num_requests = 0
        self.num_refused: Counter[str] = Counter()  # by reason
        self._model_limits, self._bounds, self._acceptance, self._gateways = model_limits, bounds, acceptance, gateways
        self._lifecycle, self._waiting, self._parallel_sampling = lifecycle, waiting, parallel_sampling
        self._beam_scheduler, self._streams, self._outbox = beam_scheduler, streams, outbox
        self._arrivals = 0
        self.pools = PoolHandler(model_limits, lifecycle, waiting)

    def on_message(self, peer: int, frame: Generate | Pool | Cancel | Stop | PathLost, now: float) -> None:
        """A frame from a gateway, or from a detokenizer about a running request."""
        match frame:
            case Generate():
                if peer not in self._gateways.incarnations:
                    self._gateways.add(peer)
                self._generate(peer, frame, now)
            case Pool():
                self._gateways.add(peer)
                self._pool(peer, frame, now)
            case Cancel():
                self._cancel(frame)
            case Stop():
                self._stop(frame)
            case PathLost(gateway):  # the gateway asks for the missing ids
                self._outbox.answer(gateway, PathLost(peer))

    def on_detokenizer(self, incarnation: int) -> None:
        """A detokenizer joined: accepts the requests that were sent again while there was none."""
        self._streams.add_detokenizer(incarnation)
        self._gateways.tell_lost_detokenizers()
        for request in self._lifecycle.requests.values():
            if request.attempt:
                self._acceptance.accept(request)

    def on_attached(self, has_kv: bool, now: float) -> None:
        """A worker is attached. Prompts that came before the first one wait as prompts of a model without KV do."""
        for pool in self.pools.unpack_all() if has_kv else ():
            if not pool.accepted:
                self._acceptance.on_arrival(self.pools.first_request(pool), now)

    def on_member_lost(self, member: int) -> None:
        """A member is lost, which may be a detokenizer or a gateway."""
        self._streams.remove_detokenizer(member, self._lifecycle.requests.values())
        self._gateways.tell_lost_detokenizers()
        self._gateways.remove(member)

    def expire(self, now: float) -> None:
        """Refuses requests that have waited for the maximum delay."""
        for request in self._acceptance.expire(now):
            self._refuse(request, Refusal(503, "", "the request waited for the maximum queue delay"), "overdue")

    def end_unservable(self, request: Request, refusal: Refusal) -> None:
        """Refuses a request that waits, or ends its choices with the error if it was accepted."""
        if not request.accepted:
            self._refuse(request, refusal, "invalid")
        while request.accepted and request.sequences:
            self._lifecycle.fail(next(iter(request.sequences.values())), refusal.message, refusal.status)

    def tell_capacity(self) -> None:
        """Tells all gateways if the queue became full or has room again."""
        capacity = self._bounds.changed_capacity()
        if capacity is not None:
            self._gateways.tell_capacity(capacity)

    def _generate(self, gateway: int, frame: Generate, now: float) -> None:
        """Takes a new request, or a new attempt of one that a gateway sends again after a loss."""
        request = self._lifecycle.requests.get(frame.request_id)
        if request is not None and frame.attempt <= request.attempt:
            if frame.attempt == request.attempt and request.accepted:
                self._acceptance.notify(request)  # a repeated frame gets a repeated answer
            return
        found = self._model_limits.find_adapters(frame)
        adapters = NO_ADAPTERS if isinstance(found, Refusal) else found
        frame = adapters.frame(frame)
        refusal = self._model_limits.validate(frame, adapters.model_len) or (
            found if isinstance(found, Refusal) else None
        )
        if refusal is not None:
            if request is not None:
                self._lifecycle.drop(request)
            self._answer(gateway, frame, refusal, "invalid")
            return
        num_sequences = len(frame.choices) if frame.beam is None else frame.beam.width
        amount = QueueAmount(num_sequences, num_sequences * num_ids(frame.prompt_ids), num_sequences)
        owner = (frame.tenant, frame.user)
        # later attempts had their place in the queue
        if frame.attempt == 0 and not self._make_room(gateway, frame, owner, amount):
            return
        resumable = self._resumable(request, frame)
        if request is not None and resumable:
            self._rebind(request, gateway, frame, resumable)
        else:
            self._start(request, gateway, frame, now, adapters)

    def _pool(self, gateway: int, frame: Pool, now: float) -> None:
        """Takes a new request with many prompts, or a new attempt of one."""
        known = self._lifecycle.pools.get(frame.request_id)
        if known is not None and known.attempt == frame.attempt:
            if known.accepted:
                self._acceptance.notify_pool(known)  # a repeated frame gets a repeated answer
            return
        self._arrivals += known is None
        pool = self.pools.take(gateway, frame, now, self._arrivals, self._answer, self._make_room)
        if pool is None:
            return
        if frame.attempt or frame.is_later:
            self._acceptance.accept_pool(pool)
        else:
            self._acceptance.on_arrival(self.pools.first_request(pool), now)

    def _cancel(self, frame: Cancel) -> None:
        self.pools.cancel(frame)
        request = self._lifecycle.requests.get(frame.request_id)
        if request is not None and request.attempt <= frame.attempt:
            self._lifecycle.drop(request)

    def _stop(self, frame: Stop) -> None:
        """The detokenizer found a stop string and has closed the stream: the sequence ends without a final step."""
        for stream in frame.streams:
            request = self._lifecycle.requests.get(stream.request_id)
            if request is not None and request.attempt == stream.attempt:
                sequence = request.sequences.get(stream.choice)
                if sequence is not None:
                    self._lifecycle.end(sequence)

    def _make_room(self, gateway: int, frame: Generate | Pool, owner: Owner, amount: QueueAmount) -> bool:
        """Whether a new request may wait. If the queue is full, refuses it, or other requests in its place."""
        if frame.batch_line:
            gone = list[Request]() if self._bounds.takes_batch_line(amount) else None
        else:
            gone = self._bounds.make_room(owner, amount)
        if gone is None:
            reason = "delay" if self._bounds.is_long() else "full"
            self._answer(gateway, frame, ALL_ASLEEP if self._bounds.is_asleep else QUEUE_FULL, reason)
            return False
        for request in gone:
            self._refuse(request, QUEUE_FULL, "displaced")
        return True

    def _refuse(self, request: Request, refusal: Refusal, reason: str) -> None:
        """Refuses a request that waits and is not accepted; for a prompt of many, all of them, once."""
        if request.pool is None:
            self._lifecycle.drop(request)
            self._answer(request.gateway, request, refusal, reason)
        elif (pool := self._lifecycle.pools.get(request.pool.id)) is not None:
            self.pools.drop(pool)
            self._answer(pool.gateway, pool, refusal, reason)

    def _answer(
        self, gateway: int, asked: Generate | Pool | Request | PooledRequest, refusal: Refusal, reason: str
    ) -> None:
        self.num_refused[reason] += 1
        capacity = self._bounds.capacity()
        request_id = asked.request_id if isinstance(asked, Generate | Pool) else asked.id
        frame = Refused(request_id, asked.attempt, refusal.status, refusal.field, refusal.message, capacity)
        self._outbox.answer(gateway, frame)

    def _resumable(self, request: Request | None, frame: Generate) -> dict[int, messages.ChoiceState]:
        """The choices of the frame, by index, that continue: only their text stream is new."""
        if request is None or not request.accepted or request.search is not None:
            return {}  # a beam search starts over
        if not self._streams.can_open(request):
            return {}
        listed = {c.index: c for c in frame.choices}
        return {
            index: listed[index]
            for index, sequence in request.sequences.items()
            if index in listed and _continues(sequence, listed[index].output_ids)
        }

    def _start(self, old: Request | None, gateway: int, frame: Generate, now: float, adapters: RequestAdapters) -> None:
        """Starts a request, after the output ids in its frame. A new attempt keeps its place in the queue."""
        found = _num_cached(old)
        if old is not None:
            self._lifecycle.drop(old)
        else:
            self.num_requests += 1
            self._arrivals += 1
        arrival = old.arrival if old is not None else self._arrivals
        request = Request(
            frame.request_id,
            frame.attempt,
            frame,
            gateway,
            arrival,
            num_ids(frame.prompt_ids),
            arrival_s=old.arrival_s if old is not None else now,
            owner=old.owner if old is not None else (frame.tenant, frame.user),
            is_batch_line=old.is_batch_line if old is not None else frame.batch_line,
            adapter=None if adapters.lora is None else adapters.lora.number,
            prompt_adapter=None if adapters.prompt is None else adapters.prompt.number,
            num_virtual=adapters.num_virtual,
            transfer_params=TransferParams.read(frame.kv_transfer_params) if frame.kv_transfer_params else None,
            num_added=0 if adapters.lora is None else adapters.lora.num_added_tokens,
            added_tokens=[] if adapters.lora is None else adapters.lora.added_tokens,
        )
        self._lifecycle.add(request)
        self._add_sequences(request, frame.choices, found)
        self._acceptance.on_arrival(request, now)

    def _rebind(
        self, request: Request, gateway: int, frame: Generate, resumable: dict[int, messages.ChoiceState]
    ) -> None:
        """Gives a live request new streams. Sequences in `resumable` continue, others start after the frame's ids."""
        self._streams.close(request)
        found = _num_cached(request)
        for sequence in list(request.sequences.values()):
            if sequence.index not in resumable:
                self._lifecycle.end(sequence)
        request.rebind(frame, gateway)
        self._add_sequences(request, [listed for listed in frame.choices if listed.index not in resumable], found)
        self._acceptance.accept(request)
        for index, listed in resumable.items():
            self._streams.resend(request.sequences[index], num_ids(listed.output_ids))

    def _add_sequences(
        self, request: Request, listed: list[messages.ChoiceState], found: dict[int, int | None]
    ) -> None:
        sequences = [make_sequence(request, one.index, one.output_ids, found.get(one.index)) for one in listed]
        request.add_sequences(sequences)
        if request.frame.beam is not None:
            self._beam_scheduler.begin(request, request.frame.beam)
        elif len(request.sequences) > 1:
            self._parallel_sampling.add(request, sequences)
        else:
            for sequence in sequences:
                self._waiting.push(sequence)


def _num_cached(request: Request | None) -> dict[int, int | None]:
    """Cached prompt tokens of each sequence of an earlier attempt; None if it never ran."""
    return (
        {} if request is None else {index: sequence.num_cached_tokens for index, sequence in request.sequences.items()}
    )


def _continues(sequence: Sequence, output_ids: bytes) -> bool:
    """Whether the gateway's ids are a prefix of the sequence's ids, and the rest can be sent to it.

    Log-probabilities cannot be sent again, because they are not kept here: undelivered ones are computed again.
    """
    num_delivered = num_ids(output_ids)
    if num_delivered > len(sequence.outputs) or sequence.outputs[:num_delivered].tobytes() != output_ids:
        return False
    sampling = sequence.request.frame.sampling
    if sampling.num_prompt_logprobs is not None and not num_delivered and sequence.prompt_next:
        return False
    return sampling.num_logprobs is None or num_delivered == len(sequence.outputs)
