"""Open requests on their way through the ring: sent, accepted or refused, and sent again when a member is lost."""

import logging
from collections import OrderedDict

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Accepted, Cancel, Member, Refused, Role
from blockyard.shared.ring_client.admission import Admission, not_ready, too_busy
from blockyard.shared.ring_client.journal import MAX_GAPS, Entry, Journal
from blockyard.shared.ring_client.meters import Meters
from blockyard.shared.ring_client.ring_links import RingLinks

log = logging.getLogger(__name__)

LOST_RETRY_S = 0.1
MAX_LOST = 1000  # members gone of late that are remembered


class Dispatch:
    """The journal's effects: what it says must be sent goes out here."""

    def __init__(
        self, links: RingLinks, journal: Journal, admission: Admission, meters: Meters, stall_timeout_s: float
    ) -> None:
        self._links, self._journal, self._admission, self._meters = links, journal, admission, meters
        self._stall_timeout_s = stall_timeout_s
        self._waiting: dict[str, Entry] = {}  # to be sent again once there is a scheduler, and it is time
        self._lost: OrderedDict[int, None] = OrderedDict()

    def open(self, entry: Entry, now: float) -> None:
        self._journal.open(entry)
        self._send(entry)

    def close(self, entry: Entry) -> None:
        """The request is over for its caller; what still runs of it is cancelled."""
        if self._journal.close(entry.request_id) is None:
            return
        self._waiting.pop(entry.request_id, None)
        if entry.num_open and entry.scheduler is not None:
            self._links.send(entry.scheduler, Cancel(entry.request_id, entry.attempt))

    def fail(self, entry: Entry, error: RequestError) -> None:
        self.close(entry)
        entry.owner.failed(entry, error)

    def accepted(self, peer: int, frame: Accepted, now: float) -> None:
        self._admission.heard(peer, frame.room, now)
        entry = self._journal.entries.get(frame.request_id)
        if entry is None:
            self._links.send(peer, Cancel(frame.request_id, frame.attempt))
        elif frame.attempt == entry.attempt:
            entry.heard_s = now
            entry.detokenizer = frame.detokenizer
            entry.accept()
            if frame.detokenizer in self._lost:  # the scheduler will learn of it any moment
                entry.not_before_s = now + LOST_RETRY_S
                self._waiting[entry.request_id] = entry

    def refused(self, peer: int, frame: Refused, now: float) -> None:
        self._admission.heard(peer, frame.room, now)
        entry = self._journal.entries.get(frame.request_id)
        if entry is None or frame.attempt != entry.attempt:
            return
        if entry.accepted and frame.status in (429, 503):  # it was admitted once: it only waits
            entry.heard_s = now
            entry.not_before_s = now + frame.room.retry_after_s
            self._no_home(entry)
            return
        entry.scheduler = None  # it keeps nothing that would have to be cancelled
        error = RequestError(frame.message, frame.field, frame.status)
        if frame.status == 429:
            error = too_busy(frame.room.retry_after_s)
        elif frame.status == 503:
            error.retry_after_s = frame.room.retry_after_s
        self.fail(entry, error)

    def changed(self, member: Member, now: float) -> None:
        self._lost.pop(member.incarnation, None)
        if member.role == Role.SCHEDULER:
            self.retry(now)

    def gone(self, member: Member, now: float) -> None:
        self._lost[member.incarnation] = None
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        hit = list(self._journal.through(member.incarnation))
        if hit:
            log.warning("%s is gone: %d open requests are sent again", member.name, len(hit))
        for entry in hit:
            self.again(entry, now)

    def tick(self, now: float) -> None:
        """Twice a second or so: repeats what is silent, gives up what never found a scheduler."""
        for entry in self._journal.silent_since(now - self._stall_timeout_s):
            log.warning("nothing came for %s in %.0f s: sent again", entry.request_id, self._stall_timeout_s)
            self.again(entry, now)
        for entry in list(self._waiting.values()):
            if not entry.accepted and now - entry.opened_s > self._stall_timeout_s:
                self.fail(entry, not_ready(f"the model `{entry.model}`"))

    def retry(self, now: float) -> None:
        """Every 0.1 s or so: sends again what waited for a time or a scheduler."""
        for entry in list(self._waiting.values()):
            if entry.not_before_s <= now and self._admission.schedulers(entry.model):
                self.again(entry, now)

    def mend(self, entry: Entry, now: float) -> None:
        """Frames of it were lost: the ids after the gap are asked for again."""
        if entry.request_id not in self._journal.entries:
            return
        entry.gaps += 1
        if entry.gaps > MAX_GAPS:
            self.fail(entry, RequestError("the answer arrived with gaps that repetition did not close", status=500))
        else:
            self.again(entry, now)

    def again(self, entry: Entry, now: float) -> None:
        self._meters.resent += 1
        entry.attempt += 1
        entry.detokenizer = None
        entry.heard_s = now
        self._send(entry)

    def _send(self, entry: Entry) -> None:
        before = entry.scheduler
        candidates = self._admission.schedulers(entry.model)
        chosen = before if before in candidates else self._admission.roomiest(candidates, entry.heard_s)
        if chosen is None or not self._links.send(chosen, entry.generate()):
            self._no_home(entry)
            return
        entry.scheduler = chosen
        self._waiting.pop(entry.request_id, None)
        if before is not None and before != chosen and before not in self._lost:
            self._links.send(before, Cancel(entry.request_id, entry.attempt - 1))

    def _no_home(self, entry: Entry) -> None:
        entry.scheduler = None
        self._waiting[entry.request_id] = entry
