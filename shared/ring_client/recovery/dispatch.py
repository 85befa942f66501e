"""Sends open requests to schedulers, and retries until one accepts."""

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Cancel, FinishReason
from blockyard.shared.ring_client.journal import Journal
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.open_entry import OpenEntry
from blockyard.shared.ring_client.recovery.hold import HOLD_S, HeldRequests
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.schedulers import Schedulers


class Dispatch:
    """Opens, sends, resends and closes the journal's requests."""

    def __init__(
        self, links: RingLinks, journal: Journal, schedulers: Schedulers, meters: Meters, hold_s: float = HOLD_S
    ) -> None:
        self._links, self._journal, self._schedulers, self._meters = links, journal, schedulers, meters
        self.hold = HeldRequests(hold_s)
        self.waiting: dict[str, OpenEntry] = {}  # to be sent again when due and a scheduler is ready

    def check_hold(self, model: str, num_choices: int, num_tokens: int) -> None:
        """Raises a 503 if a new request must be held and exceeds the bounds."""
        if not self._schedulers.of(model):
            self.hold.check(model, num_choices, num_tokens)

    def open(self, entry: OpenEntry, now: float) -> None:
        entry.open(now)
        self._journal.open(entry)
        if not self._send(entry):
            self.hold.put(entry, now)

    def close(self, entry: OpenEntry) -> None:
        """Closes a request, and cancels its choices that still run."""
        self._close(entry, FinishReason.CANCELLED)

    def _close(self, entry: OpenEntry, finish: FinishReason | None) -> None:
        if self._journal.close(entry.request_id) is None:
            return
        if finish is not None:
            self._meters.ended_early(entry.num_open, finish)
        self.waiting.pop(entry.request_id, None)
        self.hold.drop(entry)
        if entry.num_open and entry.scheduler is not None:
            self._links.send(entry.scheduler, Cancel(entry.request_id, entry.attempt))

    def fail(self, entry: OpenEntry, error: RequestError) -> None:
        self._close(entry, FinishReason.FAILED if entry.accepted else None)  # refused requests are not counted
        entry.on_failed(error)

    def resend(self, entry: OpenEntry, now: float) -> None:
        self._meters.request_resent()
        entry.next_attempt(now)
        if not self._send(entry):
            self.waiting[entry.request_id] = entry

    def resend_at(self, entry: OpenEntry, when: float) -> None:
        """Sends it again at that time, unless it is sent earlier for another reason."""
        entry.postpone(when)
        self.waiting[entry.request_id] = entry

    def retry(self, now: float) -> None:
        """Called about every 0.1 s: sends requests that waited for a time or a scheduler."""
        for entry in list(self.waiting.values()):
            if entry.not_before_s <= now and self._schedulers.of(entry.model, *entry.adapters):
                self.resend(entry, now)
        for entry in self.hold:  # as a new request: the scheduler may refuse it
            entry.heard(now)
            if self._send(entry):
                self.hold.drop(entry)

    def _send(self, entry: OpenEntry) -> bool:
        """Returns False if there is no scheduler to send it to."""
        before = entry.scheduler
        candidates = self._schedulers.of(entry.model, *entry.adapters)
        chosen = before if before in candidates else self._schedulers.most_free(candidates, entry.heard_s)
        if chosen is None or not self._links.send(chosen, entry.frame()):
            entry.assign(None)
            return False
        entry.assign(chosen)
        self.waiting.pop(entry.request_id, None)
        if before is not None and before != chosen:  # False if it is gone
            self._links.send(before, Cancel(entry.request_id, entry.attempt - 1))
        return True
