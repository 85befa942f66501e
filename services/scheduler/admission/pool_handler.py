"""Handles requests for vectors of many prompts: new ones, new attempts after a loss, and cancels."""

from collections.abc import Callable

from blockyard.services.scheduler.admission.model_limits import ModelLimits, Refusal
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.queue.waiting_queue import Owner, WaitingQueue
from blockyard.services.scheduler.sequences.pooled_requests import PACKED, PooledRequest, finds_prefix, prompts_of
from blockyard.services.scheduler.sequences.requests import QueueAmount, Request
from blockyard.shared.messages import Cancel, Pool
from blockyard.shared.token_ids import num_ids

Refuse = Callable[[int, Pool, Refusal, str], None]  # answers a frame; the text is the reason for metrics
MakeRoom = Callable[[int, Pool, Owner, QueueAmount], bool]


class PoolHandler:
    """Keeps the requests of a Pool together. `RequestHandler` calls it, and answers."""

    def __init__(self, model_limits: ModelLimits, lifecycle: Lifecycle, waiting: WaitingQueue) -> None:
        self.num_prompts = 0
        self._model_limits, self._lifecycle, self._waiting = model_limits, lifecycle, waiting

    def take(
        self, gateway: int, frame: Pool, now: float, arrival: int, refuse: Refuse, make_room: MakeRoom
    ) -> PooledRequest | None:
        """Takes a new request, or a new attempt of one; None if it is refused, or older than the known one.

        The caller accepts what is returned, at once or later. A new attempt lists the prompts whose results the
        gateway lacks: those that still run or wait go on, others start again.
        """
        pool = self._lifecycle.pools.get(frame.request_id)
        if pool is not None and frame.attempt <= pool.attempt:
            return pool if frame.attempt == pool.attempt and pool.accepted else None
        refusal = self._model_limits.validate_pool(frame)
        if refusal is not None:
            if pool is not None:
                self.drop(pool)
            refuse(gateway, frame, refusal, "invalid")
            return None
        owner = (frame.tenant, frame.user)
        amount = QueueAmount(num_ids(frame.indexes), num_ids(frame.token_ids), 1)
        whole = amount.plus(QueueAmount(frame.later_prompts, frame.later_tokens))
        if frame.attempt == 0 and not frame.is_later and not make_room(gateway, frame, owner, whole):
            return None
        if pool is None:
            card = self._model_limits.card
            of_prefix = finds_prefix(frame, card.pooling if card is not None else None)
            pool = PooledRequest(
                frame.request_id, frame.attempt, gateway, arrival, now, owner, of_prefix, is_later=frame.is_later
            )
            self.num_prompts += amount.sequences
        else:
            pool.rebind(frame.attempt, gateway)
        self._add_missing(pool, frame)
        return pool

    def _add_missing(self, pool: PooledRequest, frame: Pool) -> None:
        self._lifecycle.pools[pool.id] = pool
        card = self._model_limits.card
        if card is None or (card.pooling is not None and not card.pooling.has_kv):
            self._pack(pool, frame)
        else:
            self._add_prompts(pool, frame)

    def _pack(self, pool: PooledRequest, frame: Pool) -> None:
        """Queues the texts for a model without KV, where each step takes as many as fit."""
        sequence = pool.packed
        if sequence is None:
            sequence = pool.add_packed(frame)
            self._lifecycle.add(sequence.request)
        else:
            assert sequence.request.texts is not None, "it is packed"
            self._waiting.discard(sequence)
            sequence.request.texts.set_frame(frame)
        if sequence.amount.sequences:
            self._waiting.push(sequence)

    def unpack_all(self) -> list[PooledRequest]:
        """The model turns out to have a KV cache: each prompt becomes a sequence. Returns the requests."""
        unpacked = [(pool, packed) for pool in self._lifecycle.pools.values() if (packed := pool.packed) is not None]
        for pool, packed in unpacked:
            assert packed.request.texts is not None, "it is packed"
            self._add_prompts(pool, packed.request.texts.frame)
            self._lifecycle.drop(packed.request)
        return [pool for pool, _ in unpacked]

    def _add_prompts(self, pool: PooledRequest, frame: Pool) -> None:
        prompts = list(prompts_of(frame))
        wanted = {prompt.index for prompt in prompts}
        unwanted = [request for index, request in pool.requests.items() if index not in wanted and index != PACKED]
        for prompt in prompts:
            if prompt.index not in pool.requests:
                sequence = pool.add(prompt, frame)
                self._lifecycle.add(sequence.request)
                self._waiting.push(sequence)
        for request in unwanted:
            self._lifecycle.drop(request)

    def cancel(self, frame: Cancel) -> None:
        pool = self._lifecycle.pools.get(frame.request_id)
        if pool is not None and pool.attempt <= frame.attempt:
            self.drop(pool)

    def drop(self, pool: PooledRequest) -> None:
        """Ends all prompts of a request without an answer."""
        for request in list(pool.requests.values()):
            self._lifecycle.drop(request)

    def first_request(self, pool: PooledRequest) -> Request:
        return next(iter(pool.requests.values()))
