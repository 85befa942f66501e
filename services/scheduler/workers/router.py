"""Routes waiting sequences to worker groups: each to the group with the fewest tokens to compute for and before it.

With one group, sequences are taken straight from the waiting queue. With several, each step of the core begins with
`route`: the next sequence goes to the queue of a group, as long as a group has room, and starts with that group's next
plan. Group queues are short, about one step of tokens, so that other sequences can still go where there is room first.
A sequence may wait longer for a group that computes a prefix which they share.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from blockyard.services.scheduler.admission.acceptance import Acceptance
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Key, Phase, Sequence

RUNNING_TOKENS = 128  # the cost of a running sequence, in prompt tokens: it will decode for a while
TOO_LONG = 1 << 40  # the cost of a group in which the sequence reaches the length limit
MAX_PLANS_WAITED = 4  # in a group queue, before a sequence may go to another group

_by_key = attrgetter("key")
_NOTHING = PrefixMatch()


def cost(num_tokens: int, backlog: int, num_running: int) -> tuple[int, int]:
    """The cost of a group for a sequence. `num_tokens` are to be computed for it there, and `backlog` before it."""
    return (num_tokens + backlog + RUNNING_TOKENS * num_running, num_running)


@dataclass(slots=True, eq=False)
class RoutedSequence:
    """A sequence in a group queue, or one that came from there and is in prefill."""

    sequence: Sequence
    ticket: int  # its ticket in the waiting queue while it is in the group queue
    key: Key
    num_tokens: int  # to compute, when it was routed
    num_blocks: int
    since: int  # the last plan sent when it was routed

    @property
    def waits(self) -> bool:
        return self.sequence.ticket == self.ticket

    def left(self, group: WorkerGroup) -> int:
        """Prompt tokens that are still to be scheduled."""
        if self.waits:
            return self.num_tokens
        running = self.sequence.last_run
        if running is None or self.sequence.phase is not Phase.RUNNING or running.worker != group.worker:
            return 0
        return max(0, running.prefill_end - running.num_scheduled_tokens)


@dataclass(slots=True, eq=False)
class GroupQueue:
    """The sequences routed to one group."""

    group: WorkerGroup
    entries: list[RoutedSequence] = field(default_factory=list)  # waiting, in the order of the policy
    unfinished: list[RoutedSequence] = field(default_factory=list)  # waiting and in prefill
    backlog: int = 0  # their prompt tokens that are still to be scheduled
    num_blocks: int = 0  # that `entries` will take

    def refresh(self) -> None:
        """Brings the counts up to date before sequences are routed: plans were built since."""
        self.entries = [routed for routed in self.entries if routed.waits]
        self.num_blocks = sum(routed.num_blocks for routed in self.entries)
        known = [(routed, left) for routed in self.unfinished if (left := routed.left(self.group))]
        self.unfinished, self.backlog = [routed for routed, _ in known], sum(left for _, left in known)

    @property
    def num_sequences(self) -> int:
        return len(self.group.running) + len(self.entries)

    @property
    def is_full(self) -> bool:
        return self.num_sequences >= self.group.max_num_seqs

    @property
    def is_busy(self) -> bool:
        """The next plan is full: only a sequence with a cached prefix here should wait for this group."""
        return self.backlog >= self.group.max_num_batched_tokens

    def num_blocks_in_progress(self, hashes: list[bytes], num_cached_blocks: int) -> int:
        """Leading blocks that will be cached once the unfinished sequences are computed.

        Hashes are chained: where two sequences have the same hash, all blocks before are the same.
        """
        most = num_cached_blocks
        for routed in self.unfinished:
            other = routed.sequence.block_hashes
            end = min(len(hashes), len(other))
            if end <= most or hashes[most] != other[most]:
                continue
            low, high = most + 1, end  # the first `low` hashes are equal
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if hashes[middle - 1] == other[middle - 1] else (low, middle - 1)
            most = low
        return most

    def will_cache(self, first: bytes) -> bool:
        """Whether an unfinished sequence begins with the block of this hash."""
        return any(
            routed.sequence.block_hashes and routed.sequence.block_hashes[0] == first for routed in self.unfinished
        )

    def requeue(self, waiting: WaitingQueue) -> None:
        """Puts the waiting sequences back into the order of the waiting queue."""
        for routed in self.entries:
            if routed.waits:
                waiting.requeue(routed.sequence)
        self.entries = []

    def add(self, routed: RoutedSequence) -> None:
        insort(self.entries, routed, key=_by_key)
        self.unfinished.append(routed)
        self.backlog += routed.num_tokens
        self.num_blocks += routed.num_blocks


class Router:
    def __init__(self, waiting: WaitingQueue, groups: Mapping[int, WorkerGroup], acceptance: Acceptance) -> None:
        self._waiting, self._policy = waiting, waiting.policy
        self._groups, self._acceptance = groups, acceptance
        self._queues: dict[int, GroupQueue] = {}

    def requeue_all(self) -> None:
        """Empties all group queues into the waiting queue."""
        for queue in self._queues.values():
            queue.requeue(self._waiting)

    def route(self) -> list[WorkerGroup]:
        """Moves waiting sequences to group queues while there is room. Returns the groups that got any."""
        chosen: list[WorkerGroup] = []
        if len(self._groups) < 2 or self._next() is None:
            return chosen
        queues = [self._queue_of(group) for group in self._groups.values()]
        for queue in queues:
            if queue.unfinished or queue.entries:
                queue.refresh()
                self._requeue_stalled(queue)
        queues = [queue for queue in queues if not queue.is_full]
        while queues and (sequence := self._next()) is not None:
            best = self._best(queues, sequence)
            if best is None:
                break
            queue, num_tokens, num_blocks = best
            self._add(queue, sequence, num_tokens, num_blocks)
            chosen.append(queue.group)
            if queue.is_full:
                queues.remove(queue)
        return chosen

    def next(self, group: WorkerGroup) -> Sequence | None:
        """The next sequence for this group: from its queue, else from the waiting queue."""
        queue = self._queues.get(group.worker)
        if queue is not None:
            while queue.entries and not queue.entries[0].waits:
                queue.entries.pop(0)
            if queue.entries:
                return queue.entries[0].sequence
        return self._waiting.peek()

    def reserve(self, group: WorkerGroup, sequence: Sequence) -> None:
        """Routes a sequence to the group where others were preempted for it: it is to preempt none elsewhere."""
        if len(self._groups) > 1 and not sequence.is_held:
            self._add(
                self._queue_of(group),
                sequence,
                sequence.num_tokens,
                group.kv_cache.num_blocks_to_take(sequence.num_tokens, _NOTHING, alone=not group.running),
            )

    def remove_group(self, group: WorkerGroup) -> None:
        """Requeues the sequences of a lost group."""
        queue = self._queues.pop(group.worker, None)
        if queue is not None:
            queue.requeue(self._waiting)

    def _next(self) -> Sequence | None:
        """The next waiting sequence, if it may be scheduled now."""
        sequence = self._waiting.peek()
        if sequence is None or sequence.awaits_results() or not self._acceptance.can_accept(sequence.request):
            return None
        return sequence

    def _queue_of(self, group: WorkerGroup) -> GroupQueue:
        queue = self._queues.get(group.worker)
        if queue is None:
            queue = self._queues[group.worker] = GroupQueue(group)
        return queue

    def _best(self, queues: list[GroupQueue], sequence: Sequence) -> tuple[GroupQueue, int, int] | None:
        """The group queue of the lowest cost, with the tokens and blocks to take there; None if no group has room."""
        best, lowest = None, None
        known, size, first = sequence.num_tokens, 0, None
        near = _sibling_groups(sequence)
        own = max(1, known - sequence.request.num_prompt)  # tokens that other sequences of the request do not compute
        for queue in queues:
            pool = queue.group.kv_cache.blocks
            if pool.block_size != size:
                size, first = pool.block_size, queue.group.kv_cache.first_hash(sequence)
            num_tokens, backlog, found = known, queue.backlog, _NOTHING
            if first is not None and (
                queue.group.kv_cache.may_have_cached(first) or (queue.unfinished and queue.will_cache(first))
            ):
                num_tokens, backlog, found = self._find(queue, sequence)
            elif queue.group.worker in near:
                num_tokens = own
            elif queue.is_busy:
                continue
            too_long = TOO_LONG if known >= queue.group.max_model_len else 0
            price = cost(num_tokens, backlog + too_long, len(queue.group.running) + len(queue.entries))
            if lowest is not None and price >= lowest:
                continue
            num_blocks = queue.group.kv_cache.num_blocks_to_take(known, found, alone=not queue.group.running)
            if pool.admits(num_blocks + queue.num_blocks, found.blocks, alone=not queue.num_sequences):
                best, lowest = (queue, num_tokens, num_blocks), price
        return best

    def _find(self, queue: GroupQueue, sequence: Sequence) -> tuple[int, int, PrefixMatch]:
        """Tokens to compute, tokens to compute before them, and the cached prefix.

        Blocks that an unfinished sequence computes for both are counted in neither number.
        """
        found, size, coming = queue.group.kv_cache.find(sequence), queue.group.kv_cache.block_size, 0
        if found.next_hash is not None:
            num_cached_blocks = found.num_tokens // size
            coming = (queue.num_blocks_in_progress(sequence.block_hashes, num_cached_blocks) - num_cached_blocks) * size
        num_tokens = sequence.num_tokens - found.num_tokens - coming
        return max(1, num_tokens), max(0, queue.backlog - coming), found

    def _add(self, queue: GroupQueue, sequence: Sequence, num_tokens: int, num_blocks: int) -> None:
        key = self._policy.key(sequence)
        self._waiting.hold(sequence)
        queue.add(
            RoutedSequence(sequence, sequence.ticket, key, num_tokens, num_blocks, queue.group.plan_clock.last_sent)
        )

    def _requeue_stalled(self, queue: GroupQueue) -> None:
        """Requeues sequences that were not scheduled in MAX_PLANS_WAITED plans."""
        sent = queue.group.plan_clock.last_sent
        if queue.entries and sent - min(routed.since for routed in queue.entries) > MAX_PLANS_WAITED:
            queue.requeue(self._waiting)
            queue.refresh()


def _sibling_groups(sequence: Sequence) -> set[int]:
    """Groups where other sequences of the request run."""
    others = sequence.request.active_sequences
    if len(others) < 2:
        return set()
    return {c.last_run.worker for c in others if c.last_run is not None and c.phase is Phase.RUNNING}
