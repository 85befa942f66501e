"""Accepts requests: when they are first scheduled, or after they have waited for a while.

A request can be refused with a status code only before it is accepted, because a streaming client gets its status 200
with Accepted. A later error would be an event in the stream.
"""

import math
from collections import deque

from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds
from blockyard.services.scheduler.sequences.requests import Request
from blockyard.shared.messages import Accepted

MAX_SILENCE_S = 5.0  # without an answer, if no maximum delay is set


class Acceptance:
    def __init__(self, lifecycle: Lifecycle, bounds: QueueBounds, outbox: Outbox) -> None:
        self._requests, self._streams = lifecycle.requests, lifecycle.streams
        self._waiting, self._bounds, self._outbox = lifecycle.waiting, bounds, outbox
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

    def can_accept(self, request: Request) -> bool:
        """Whether the request has a detokenizer, can get one, or needs none."""
        return request.accepted or self._streams.can_open(request)

    def accept(self, request: Request) -> bool:
        """Opens the request's streams and notifies its gateway, once. False while there is no detokenizer."""
        if request.accepted:
            return True
        if not self._streams.open(request, request.frame.choices):
            return False
        request.set_accepted()
        self._waiting.on_accepted(request)
        self.notify(request)
        return True

    def notify(self, request: Request) -> None:
        capacity = self._bounds.capacity()
        detokenizer = request.detokenizer if request.has_text else None
        self._outbox.answer(request.gateway, Accepted(request.id, request.attempt, detokenizer, capacity))

    def expire(self, now: float) -> list[Request]:
        """Requests to refuse after the maximum delay. Without a maximum they are accepted."""
        refused = []
        while self._pending and self._pending[0][0] <= now:
            _, request_id, attempt = self._pending.popleft()
            request = self._requests.get(request_id)
            if request is None or request.attempt != attempt or request.accepted:
                continue
            if self._refuses and not request.attempt:
                refused.append(request)
            elif not self.accept(request):
                self._pending.append((now + self._max_wait_s, request_id, attempt))
        self.next_expiry_s = self._pending[0][0] if self._pending else math.inf
        return refused
