"""Open requests go out to a scheduler, as often as it takes."""

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Cancel
from blockyard.shared.ring_client.admission import Admission
from blockyard.shared.ring_client.journal import Entry, Journal
from blockyard.shared.ring_client.meters import Meters
from blockyard.shared.ring_client.ring_links import RingLinks


class Dispatch:
    """The journal's effects: what it says must be sent goes out here."""

    def __init__(self, links: RingLinks, journal: Journal, admission: Admission, meters: Meters) -> None:
        self._links, self._journal, self._admission, self._meters = links, journal, admission, meters
        self.waiting: dict[str, Entry] = {}  # to be sent again once there is a scheduler, and it is time

    def open(self, entry: Entry, now: float) -> None:
        entry.heard_s = now
        self._journal.open(entry)
        self._send(entry)

    def close(self, entry: Entry) -> None:
        """The request is over for its caller; what still runs of it is cancelled."""
        if self._journal.close(entry.request_id) is None:
            return
        self.waiting.pop(entry.request_id, None)
        if entry.num_open and entry.scheduler is not None:
            self._links.send(entry.scheduler, Cancel(entry.request_id, entry.attempt))

    def fail(self, entry: Entry, error: RequestError) -> None:
        self.close(entry)
        entry.owner.failed(entry, error)

    def again(self, entry: Entry, now: float) -> None:
        self._meters.resent += 1
        entry.attempt += 1
        entry.detokenizer = None
        entry.heard_s = now
        self._send(entry)

    def later(self, entry: Entry, when: float) -> None:
        """Sends it again at that time, unless something else does before."""
        entry.not_before_s = when
        self.waiting[entry.request_id] = entry

    def retry(self, now: float) -> None:
        """Every 0.1 s or so: sends again what waited for a time or a scheduler."""
        for entry in list(self.waiting.values()):
            if entry.not_before_s <= now and self._admission.schedulers(entry.model):
                self.again(entry, now)

    def _send(self, entry: Entry) -> None:
        before = entry.scheduler
        candidates = self._admission.schedulers(entry.model)
        chosen = before if before in candidates else self._admission.roomiest(candidates, entry.heard_s)
        if chosen is None or not self._links.send(chosen, entry.generate()):
            self._no_home(entry)
            return
        entry.scheduler = chosen
        self.waiting.pop(entry.request_id, None)
        if before is not None and before != chosen:  # false where it is gone
            self._links.send(before, Cancel(entry.request_id, entry.attempt - 1))

    def _no_home(self, entry: Entry) -> None:
        entry.scheduler = None
        self.waiting[entry.request_id] = entry
