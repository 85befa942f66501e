"""Lets requests into the ring as its waiting queue has room for them: a thousand prompts at once are no flood."""

from collections import OrderedDict

from blockyard.shared.ring_client.admission import not_ready
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.recovery.journal import JournalEntry


class InflightLimiter:
    """Requests in the order they came. Its owner calls `pump` whenever there may be room again."""

    def __init__(self, client: RingClient, model: str, patience_s: float) -> None:
        self._client, self._model, self._patience_s = client, model, patience_s
        self._served_s = client.clock()  # when there last was a scheduler
        self._queue: OrderedDict[str, JournalEntry] = OrderedDict()
        # id -> choices and prompt tokens of those sent and neither accepted nor refused, and their sums
        self._unanswered: dict[str, tuple[int, int]] = {}
        self._num_choices = self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, entry: JournalEntry) -> None:
        self._queue[entry.request_id] = entry

    def drop(self, entry: JournalEntry) -> None:
        """Nobody wants it any more. Whether it was sent does not matter."""
        self._queue.pop(entry.request_id, None)
        self.answered(entry)

    def answered(self, entry: JournalEntry) -> None:
        """It was accepted, or has ended otherwise."""
        choices, tokens = self._unanswered.pop(entry.request_id, (0, 0))
        self._num_choices -= choices
        self._num_tokens -= tokens

    def refused(self, entry: JournalEntry) -> None:
        """There was no room for it: it is next once there is."""
        self.answered(entry)
        self.put(entry)
        self._queue.move_to_end(entry.request_id, last=False)

    def pump(self) -> None:
        now = self._client.clock()
        if not self._client.admission.schedulers(self._model):
            self._wait_for_scheduler(now)
            return
        self._served_s = now
        while self._queue:
            entry = next(iter(self._queue.values()))
            choices = len(entry.choices) if entry.beam is None else entry.beam.width
            tokens = entry.num_prompt_tokens * choices
            wanted = (self._num_choices + choices, self._num_tokens + tokens)
            if not self._client.admission.takes(self._model, *wanted, now, alone=not self._unanswered):
                return
            del self._queue[entry.request_id]
            self._unanswered[entry.request_id] = (choices, tokens)
            self._num_choices, self._num_tokens = wanted
            entry.opened_s = entry.heard_s = now
            self._client.dispatch.open(entry, now)

    def _wait_for_scheduler(self, now: float) -> None:
        """It is being restarted. Not for ever: a script is better told."""
        if now - self._served_s > self._patience_s:
            failed, self._queue = self._queue, OrderedDict()
            for entry in failed.values():
                entry.owner.failed(entry, not_ready(f"the model `{self._model}`"))
