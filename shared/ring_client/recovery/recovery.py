"""Handles answers about open requests, and sends requests again when a member or a path is lost."""

import logging
from collections import OrderedDict

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Accepted, Cancel, Member, Refused, Role
from blockyard.shared.ring_client.journal import Journal
from blockyard.shared.ring_client.open_entry import MAX_GAPS, OpenEntry
from blockyard.shared.ring_client.recovery.dispatch import Dispatch
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.schedulers import MODEL_NOT_FOUND, Schedulers, not_ready, too_busy

log = logging.getLogger(__name__)

LOST_RETRY_S = 0.1
MAX_LOST = 1000  # remembered members that are gone


class Recovery:
    """Every kind of loss is handled alike: the request is sent again with the next attempt."""

    def __init__(
        self, links: RingLinks, journal: Journal, schedulers: Schedulers, dispatch: Dispatch, stall_timeout_s: float
    ) -> None:
        self._links, self._journal, self._schedulers, self._dispatch = links, journal, schedulers, dispatch
        self._stall_timeout_s = stall_timeout_s
        self._lost: OrderedDict[int, None] = OrderedDict()

    def accepted(self, peer: int, frame: Accepted, now: float) -> None:
        self._schedulers.heard(peer, frame.capacity, now)
        entry = self._journal.entries.get(frame.request_id)
        if entry is None:
            self._links.send(peer, Cancel(frame.request_id, frame.attempt))
        elif frame.attempt == entry.attempt:
            entry.accepted_by(frame.detokenizer, now)
            if frame.detokenizer in self._lost:  # the scheduler will notice soon
                self._dispatch.resend_at(entry, now + LOST_RETRY_S)

    def refused(self, peer: int, frame: Refused, now: float) -> None:
        self._schedulers.heard(peer, frame.capacity, now)
        entry = self._journal.entries.get(frame.request_id)
        if entry is None or frame.attempt != entry.attempt:
            return
        if entry.accepted and frame.status in (429, 503):  # it was accepted before: it waits
            entry.heard(now)
            entry.assign(None)
            self._dispatch.resend_at(entry, now + frame.capacity.retry_after_s)
            return
        entry.assign(None)  # the scheduler has no state of it to cancel
        retry_after_s = frame.capacity.retry_after_s
        if frame.status == 429:
            error = too_busy(retry_after_s)
        else:
            after_s = retry_after_s if frame.status == 503 else None
            code = MODEL_NOT_FOUND if frame.status == 404 else None
            error = RequestError(frame.message, frame.field, frame.status, code, after_s)
        self._dispatch.fail(entry, error)

    def changed(self, member: Member, now: float) -> None:
        self._lost.pop(member.incarnation, None)
        if member.role == Role.SCHEDULER:
            self._dispatch.retry(now)

    def gone(self, member: Member, now: float) -> None:
        self._lost[member.incarnation] = None
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        hit = list(self._journal.through(member.incarnation))
        if hit:
            log.warning("%s is gone: %d open requests are sent again", member.name, len(hit))
        for entry in hit:
            self._dispatch.resend(entry, now)

    def path_lost(self, scheduler: int, member: int, now: float) -> None:
        """Text was lost between live members, or the scheduler dropped this gateway's requests.

        They are sent in the next round of `Dispatch.retry`, which gives the broken link time to reconnect.
        """
        hit = list(self._journal.along(scheduler, None if member == self._links.me.incarnation else member))
        if hit:
            log.warning("text of %d open requests was lost on its way: they are sent again", len(hit))
        for entry in hit:
            self._dispatch.resend_at(entry, now)

    def tick(self, now: float) -> None:
        """Called about twice a second: resends stalled requests, and fails requests that never reached a scheduler."""
        for entry in self._journal.silent_since(now - self._stall_timeout_s):
            log.warning("nothing came for %s in %.0f s: sent again", entry.request_id, self._stall_timeout_s)
            self._dispatch.resend(entry, now)
        for entry in list(self._dispatch.waiting.values()):
            if not entry.accepted and now - entry.opened_s > self._stall_timeout_s:
                self._dispatch.fail(entry, not_ready(f"the model `{entry.model}`"))
        for entry, error in self._dispatch.hold.overdue(now):
            self._dispatch.fail(entry, error)

    def repair(self, entry: OpenEntry, now: float) -> None:
        """Frames of the request were lost: sends it again, or fails it after MAX_GAPS."""
        if entry.request_id not in self._journal.entries:
            return
        if entry.count_gap() > MAX_GAPS:
            self._dispatch.fail(
                entry, RequestError("the answer arrived with gaps that repetition did not close", status=500)
            )
        else:
            self._dispatch.resend(entry, now)
