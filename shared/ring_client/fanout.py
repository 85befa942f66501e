"""Distributes a step's text and vectors to its requests. Hot path: it never waits."""

from collections import OrderedDict

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Cancel, FinishReason, Role, TextBatch, TextDelta, VectorBatch, VectorBlock
from blockyard.shared.ring_client.journal import ChoiceLog, Journal, JournalEntry
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.open_entry import TokensMissing
from blockyard.shared.ring_client.pooled_entry import PooledEntry
from blockyard.shared.ring_client.recovery.dispatch import Dispatch
from blockyard.shared.ring_client.recovery.recovery import Recovery
from blockyard.shared.ring_client.ring_links import RingLinks

CANCEL_INTERVAL_S = 1.0  # an unknown id is answered with at most one Cancel in this time
MAX_CANCELLED = 10_000


class Fanout:
    def __init__(
        self, links: RingLinks, journal: Journal, dispatch: Dispatch, recovery: Recovery, meters: Meters
    ) -> None:
        self._links, self._journal, self._meters = links, journal, meters
        self._dispatch, self._recovery = dispatch, recovery
        self._cancelled: OrderedDict[str, float] = OrderedDict()  # unknown ids -> time of the last Cancel

    def text(self, batch: TextBatch, now: float) -> None:
        entries, meters, stamp_s, num_tokens = self._journal.entries, self._meters, batch.stamp_s, 0
        incomplete: dict[str, JournalEntry] = {}
        unknown: dict[str, int] = {}  # request id -> attempt
        for delta in batch.deltas:
            entry = entries.get(delta.request_id)
            if not isinstance(entry, JournalEntry):
                unknown[delta.request_id] = delta.attempt
                continue
            try:
                choice = entry.take(delta, now)
            except TokensMissing:
                incomplete[delta.request_id] = entry
                continue
            if choice is None:
                continue
            if token_ids := delta.token_ids:
                num_tokens += len(token_ids)
                if choice.first_s:
                    meters.between_tokens(choice.itl_s)
                else:
                    self._first(entry, delta, choice, now)
            if delta.finish is None:
                choice.sink.push(delta, now, stamp_s)
            else:
                if delta.finish <= FinishReason.LENGTH:
                    choice.sink.push(delta, now, stamp_s)
                self._ended(entry, delta, choice, now)
        meters.add_output_tokens(num_tokens)
        for one in incomplete.values():
            self._recovery.repair(one, now)
        for request_id, attempt in unknown.items():
            if now - self._cancelled.get(request_id, -CANCEL_INTERVAL_S) >= CANCEL_INTERVAL_S:
                self._cancel(request_id, attempt, now)

    def vectors(self, batch: VectorBatch, now: float) -> None:
        """Hands out results of pooling models, which come from their scheduler."""
        for block in batch.blocks:
            entry = self._journal.entries.get(block.request_id)
            if not isinstance(entry, PooledEntry):
                self._cancel(block.request_id, block.attempt, now)
            elif block.attempt == entry.attempt:
                self._take_block(entry, block, now)

    def _take_block(self, entry: PooledEntry, block: VectorBlock, now: float) -> None:
        try:
            lengths = entry.take(block, now)
        except TokensMissing:
            self._recovery.repair(entry, now)
            return
        self._meters.texts_pooled(entry, lengths, block.queued_s, now)
        if block.failures:
            failure = block.failures[0]
            self._meters.ended_early(len(block.failures), FinishReason.FAILED)
            error = RequestError(failure.detail, entry.field_of(failure.index), failure.status)
            self._dispatch.fail(entry, error)
        elif entry.num_open == 0:
            self._dispatch.close(entry)
            entry.finish()

    def _first(self, entry: JournalEntry, delta: TextDelta, choice: ChoiceLog, now: float) -> None:
        choice.on_first_token(now, delta.queued_s or 0.0)
        self._meters.first_token(entry, now)
        if entry.hides_output:
            self._meters.add_output_tokens(-len(delta.token_ids))  # `text` counts them with all others
        if delta.finish != FinishReason.FAILED:  # a failure before any output is a status code
            entry.accept()
            entry.owner.begun(entry)

    def _ended(self, entry: JournalEntry, delta: TextDelta, choice: ChoiceLog, now: float) -> None:
        assert delta.finish is not None
        if delta.finish > FinishReason.LENGTH:
            self._meters.ended_early(1, delta.finish)
            message = delta.detail or "the ring gave this request up"
            self._dispatch.fail(entry, RequestError(message, status=delta.status))
            return
        self._meters.choice_ended(entry, choice, delta.finish, now)
        if entry.num_open == 0:
            self._dispatch.close(entry)
            entry.accept()  # the request ended without a token
            entry.owner.finished(entry)

    def _cancel(self, request_id: str, attempt: int, now: float) -> None:
        self._cancelled[request_id] = now
        self._cancelled.move_to_end(request_id)
        if len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        for scheduler in self._links.of(Role.SCHEDULER):
            self._links.send(scheduler.incarnation, Cancel(request_id, attempt))
