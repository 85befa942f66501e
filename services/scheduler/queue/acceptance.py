"""When a request is told that it will be served: with its first seat, or after it has waited a while.

Until then it may still be refused with a status code. A client that streams gets its status with Accepted, so that one
that is put off later would get an error event in an answer that began with 200.
"""

from collections import deque

from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.detokenizer_streams import DetokenizerStreams
from blockyard.services.scheduler.sequences.requests import Request
from blockyard.shared.messages import Accepted

MAX_SILENCE_S = 5.0  # that a caller may be without an answer, where no longest wait is set


class Acceptance:
    def __init__(
        self,
        requests: dict[str, Request],
        waiting: WaitingQueue,
        bounds: QueueBounds,
        streams: DetokenizerStreams,
        outbox: Outbox,
    ) -> None:
        """`requests`: the live ones by id."""
        self._requests, self._waiting, self._bounds = requests, waiting, bounds
        self._streams, self._outbox = streams, outbox
        self._refuses = bounds.max_delay_s is not None
        self._max_wait_s = MAX_SILENCE_S if bounds.max_delay_s is None else bounds.max_delay_s
        # when each one's patience ends, its id and attempt; ids alone, because prompts of ended requests are large
        self._pending: deque[tuple[float, str, int]] = deque()

    def on_arrival(self, request: Request, now: float) -> None:
        """A request waits. One that is sent again was promised something before."""
        if not request.attempt or not self.accept(request):
            self._pending.append((now + self._max_wait_s, request.id, request.attempt))

    def can_accept(self, request: Request) -> bool:
        """Whether it can be served: it has a detokenizer, or there is one."""
        return request.accepted or len(self._streams) > 0

    def accept(self, request: Request) -> bool:
        """Opens its streams and tells its gateway, unless that is done. False while there is no detokenizer."""
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
        self._outbox.answer(request.gateway, Accepted(request.id, request.attempt, request.detokenizer, capacity))

    def expire(self, now: float) -> list[Request]:
        """Those that have waited as long as anybody may. Others are promised to be served about now."""
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
        return refused
