"""Counters and gauges of all members for metrics. Counters never fall.

A restarted member counts from 0, so the counts of its earlier incarnations by name are added. Schedulers are asked for
current counts; other members' counts are of their last heartbeat.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from blockyard.shared.messages import (
    FIRST_MASK_S,
    SECOND_TOKEN_S,
    STEP_TOKENS,
    AdapterUse,
    KVRole,
    Member,
    Role,
    Stats,
    StatsRequest,
    StatsResponse,
)
from blockyard.shared.ring_client.metrics.histogram import BucketCounts
from blockyard.shared.ring_client.metrics.peer_queries import PeerQueries
from blockyard.shared.ring_client.ring_links import RingLinks

RESPONSE_TIMEOUT_S = 0.25  # a scheduler that answers later counts with its last heartbeat
MAX_PAST = 100
MAX_KEPT = 1000  # incarnations; older ones are kept only as sums by name

COUNTERS = (  # fields of Stats
    "preemptions_total",
    "displaced_total",
    "steps_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "blocks_saved_total",
    "blocks_fetched_total",
    "malformed_total",
    "step_tokens_total",
    "transfers_landed_total",
    "transfers_aborted_total",
    "transfer_blocks_failed_total",
    "transfer_notices_dropped_total",
    "transfer_audit_differences_total",
    "second_token_us_total",
    "masks_total",
    "mask_waits_total",
    "matcher_restarts_total",
    "first_mask_us_total",
    "expert_samples_total",
    "experts_hit_total",
    "experts_hit_if_even_total",
    "experts_moved_total",
    "prefill_steps_total",
    "prefill_step_us_total",
    "prefill_launch_us_total",
    "decode_step_us_total",
    "decode_launch_us_total",
)
REFUSED, SERVED, STEP_SIZES, SECOND_TOKENS = "refused", "served", "step_sizes", "second_tokens"
FIRST_MASKS = "first_masks"
TRANSFER_BYTES, FRAMES_DROPPED = "transfer_bytes", "frames_dropped"

Key = tuple[str, str]  # (field of Stats, ""), or one of the words above with a reason, tenant, bucket or connector


@dataclass(frozen=True, slots=True)
class MemberTotals:
    """A member by its name: the counts of all its incarnations, and the stats of the latest one."""

    name: str
    role: Role
    counts: Counter[Key]
    stats: Stats
    ready: bool | None  # None: it is gone, and its gauges do not count
    kv_role: KVRole | None = None  # of a worker with KV transfers

    def count(self, field: str) -> int:
        return self.counts[field, ""]

    def of(self, what: str) -> Iterator[tuple[str, int]]:
        return ((one, count) for (kind, one), count in self.counts.items() if kind == what)


class MemberCounts:
    def __init__(self, links: RingLinks) -> None:
        self._links = links
        self._kept: dict[int, tuple[Member, Counter[Key]]] = {}  # by incarnation, in order of the last update
        self._older: dict[tuple[str, Role], Counter[Key]] = {}  # counts of older incarnations
        self._fresh: dict[int, Stats] = {}  # answers of schedulers to the last query
        self._queries = PeerQueries(links)

    async def refresh(self) -> None:
        """Asks all schedulers for their counts, and waits for answers for RESPONSE_TIMEOUT_S."""
        request, schedulers = StatsRequest(secrets.token_hex(8)), self._links.of(Role.SCHEDULER)
        for incarnation in await self._queries.ask(schedulers, request, RESPONSE_TIMEOUT_S):
            self._fresh.pop(incarnation, None)

    def on_response(self, peer: int, frame: StatsResponse) -> None:
        self._fresh[peer] = frame.stats
        if (member := self._links.members.get(peer)) is not None:
            self._note(msgspec.structs.replace(member, stats=frame.stats))
        self._queries.answered(peer, frame.request_id)

    def gone(self, member: Member) -> None:
        """Keeps its counts: its next incarnation starts at 0."""
        self._fresh.pop(member.incarnation, None)
        self._note(member)

    def past(self) -> list[Member]:
        """Returns members that are gone, at most the latest MAX_PAST, for gateways that never saw them."""
        living = self._links.members.keys() | {self._links.me.incarnation}
        return [member for incarnation, (member, _) in self._kept.items() if incarnation not in living][-MAX_PAST:]

    def members(self) -> list[MemberTotals]:
        """Returns all members: present ones, and the kept ones that are gone."""
        living = {
            m.incarnation: msgspec.structs.replace(m, stats=self._fresh.get(m.incarnation, m.stats))
            for m in [self._links.me, *self._links.members.values()]
        }
        for member in living.values():
            self._note(member)
        found: dict[tuple[str, Role], MemberTotals] = {
            (name, role): MemberTotals(name, role, Counter(counts), Stats(), None)
            for (name, role), counts in self._older.items()
        }
        for incarnation, (kept, counts) in self._kept.items():
            lives, member = incarnation in living, living.get(incarnation, kept)
            key = member.name, member.role
            before = found.get(key)
            total = counts if before is None else before.counts + counts
            if lives or before is None or before.ready is None:
                found[key] = MemberTotals(*key, total, member.stats, member.ready if lives else None, member.kv_role)
            else:
                found[key] = MemberTotals(*key, total, before.stats, before.ready, before.kv_role)
        return list(found.values())

    def _note(self, member: Member) -> None:
        """Keeps the larger counts: a heartbeat may be older than an answer."""
        before = self._kept.pop(member.incarnation, None)
        counts = _counts(member.stats)
        if before is not None:
            if counts["steps_total", ""] < before[1]["steps_total", ""]:
                member = before[0]
            counts |= before[1]
        self._kept[member.incarnation] = member, counts
        if len(self._kept) > MAX_KEPT:
            living = self._links.members.keys() | {self._links.me.incarnation}
            old, forgotten = self._kept.pop(next(one for one in self._kept if one not in living))
            self._older.setdefault((old.name, old.role), Counter()).update(forgotten)


@dataclass(frozen=True, slots=True)
class SchedulerTotals:
    """Sums over all schedulers of the ring."""

    running: int
    waiting: int
    arriving: int  # of the waiting ones: their KV blocks come from another worker
    blocks_used: int
    blocks_total: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    step_tokens: BucketCounts
    second_tokens: BucketCounts
    adapter_uses: list[AdapterUse]  # of models with adapters


def scheduler_totals(members: Iterable[MemberTotals]) -> SchedulerTotals:
    schedulers = [one for one in members if one.role is Role.SCHEDULER]
    stats = [one.stats for one in schedulers if one.ready is not None]

    def total(field: str) -> int:
        return sum(one.count(field) for one in schedulers)

    def histogram(bounds: tuple[float, ...], what: str, value: float) -> BucketCounts:
        made = BucketCounts(bounds)
        made.add(((int(bucket), count) for one in schedulers for bucket, count in one.of(what)), value)
        return made

    return SchedulerTotals(
        sum(one.running for one in stats),
        sum(one.waiting for one in stats),
        sum(one.arriving for one in stats),
        sum(one.blocks_used for one in stats),
        sum(one.blocks_total for one in stats),
        total("preemptions_total"),
        total("prefix_queries_total"),
        total("prefix_hits_total"),
        histogram(STEP_TOKENS, STEP_SIZES, float(total("step_tokens_total"))),
        histogram(SECOND_TOKEN_S, SECOND_TOKENS, total("second_token_us_total") / 1e6),
        [one.adapter_use for one in stats if one.adapter_use is not None],
    )


def _counts(stats: Stats) -> Counter[Key]:
    counts: Counter[Key] = Counter({(field, ""): getattr(stats, field) for field in COUNTERS})
    counts.update({(REFUSED, one.reason): one.total for one in stats.refused})
    counts.update({(SERVED, one.tenant): one.served for one in stats.tenants})
    counts.update({(STEP_SIZES, str(i)): count for i, count in enumerate(stats.step_sizes[: len(STEP_TOKENS) + 1])})
    seconds = stats.second_token_counts[: len(SECOND_TOKEN_S) + 1]
    counts.update({(SECOND_TOKENS, str(i)): count for i, count in enumerate(seconds)})
    counts.update({(TRANSFER_BYTES, one.name): one.total for one in stats.transfer_bytes})
    counts.update({(FRAMES_DROPPED, one.name): one.total for one in stats.transfer_frames_dropped})
    masks = stats.first_mask_counts[: len(FIRST_MASK_S) + 1]
    counts.update({(FIRST_MASKS, str(i)): count for i, count in enumerate(masks)})
    return counts
