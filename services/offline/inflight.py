"""Sends requests to the scheduler as its waiting queue has room, so that a call may have any number of prompts."""

from collections import OrderedDict

from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.journal import JournalEntry
from blockyard.shared.ring_client.schedulers import not_ready


class InflightLimiter:
    """Sends requests in order of arrival. Its owner calls `send_pending` whenever there may be room."""

    def __init__(self, client: RingClient, model: str, timeout_s: float) -> None:
        self._client, self._model, self._timeout_s = client, model, timeout_s
        self._served_s = client.clock()  # when a scheduler was last available
        self._queue: OrderedDict[str, JournalEntry] = OrderedDict()
        # id -> choices and prompt tokens of requests sent but not yet accepted or refused; below, their sums
        self._unanswered: dict[str, tuple[int, int]] = {}
        self._num_choices = self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, entry: JournalEntry) -> None:
        self._queue[entry.request_id] = entry

    def remove(self, entry: JournalEntry) -> None:
        """Forgets a request, sent or not."""
        self._queue.pop(entry.request_id, None)
        self.on_answered(entry)

    def on_answered(self, entry: JournalEntry) -> None:
        """The request was accepted or has ended."""
        choices, tokens = self._unanswered.pop(entry.request_id, (0, 0))
        self._num_choices -= choices
        self._num_tokens -= tokens

    def on_refused(self, entry: JournalEntry) -> None:
        """The queue had no room: the request is sent first once there is some."""
        self.on_answered(entry)
        self.enqueue(entry)
        self._queue.move_to_end(entry.request_id, last=False)

    def send_pending(self) -> None:
        now = self._client.clock()
        if not self._client.schedulers.of(self._model):
            self._wait_for_scheduler(now)
            return
        self._served_s = now
        while self._queue:
            entry = next(iter(self._queue.values()))
            choices = len(entry.choices) if entry.request.beam is None else entry.request.beam.width
            tokens = entry.num_prompt_tokens * choices
            wanted = (self._num_choices + choices, self._num_tokens + tokens)
            if not self._client.schedulers.takes(self._model, *wanted, now, alone=not self._unanswered):
                return
            del self._queue[entry.request_id]
            self._unanswered[entry.request_id] = (choices, tokens)
            self._num_choices, self._num_tokens = wanted
            self._client.dispatch.open(entry, now)

    def _wait_for_scheduler(self, now: float) -> None:
        """Waits while the scheduler restarts; fails all requests after `timeout_s`."""
        if now - self._served_s > self._timeout_s:
            failed, self._queue = self._queue, OrderedDict()
            for entry in failed.values():
                entry.owner.failed(entry, not_ready(f"the model `{self._model}`"))
