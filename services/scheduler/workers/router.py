"""Which group a waiting choice goes to: where the least is to be computed for it, and before it.

With one group there is nothing to decide, and whoever is next is taken straight from the waiting queue. With several,
each turn begins with `place`: whoever is next goes to a group's queue, as long as there is one with room, and takes its
seat with that group's next plan. Desks are short, a step's worth of tokens: what has not been placed yet can still go
wherever there is room first. Who begins as others do stands longer, where that beginning is computed.
"""

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.queue.acceptance import Acceptance
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Key, Phase, Sequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup

RUNNING_TOKENS = 128  # a choice that runs weighs as many tokens to be computed: it will decode for a while yet
TOO_LONG = 1 << 40  # what it costs to end at a group's limit, where another might take more
MAX_PLANS_WAITED = 4  # plans after which somebody who got no seat at a queue may go elsewhere

_by_key = attrgetter("key")
_NOTHING = PrefixMatch()


def cost(num_tokens: int, backlog: int, num_running: int) -> tuple[int, int]:
    """Of a choice with so many tokens to be computed in a group with so many before it; the lowest is taken."""
    return (num_tokens + backlog + RUNNING_TOKENS * num_running, num_running)


@dataclass(slots=True, eq=False)
class RoutedSequence:
    """A choice at a queue, or one that came from there and is in prefill."""

    sequence: Sequence
    ticket: int  # its entry in the waiting queue while it stands here
    key: Key
    num_tokens: int  # to be computed, as it seemed when it came
    num_blocks: int
    since: int  # number of the last plan sent by then

    @property
    def waits(self) -> bool:
        return self.sequence.ticket == self.ticket

    def left(self, group: WorkerGroup) -> int:
        """Tokens that are still to be granted."""
        if self.waits:
            return self.num_tokens
        running = self.sequence.last_run
        if running is None or self.sequence.phase is not Phase.RUNNING or running.worker != group.worker:
            return 0
        return max(0, running.prefill_end - running.num_scheduled_tokens)


@dataclass(slots=True, eq=False)
class GroupQueue:
    """A group, who stands before it in the order of the policy, and what it has before itself."""

    group: WorkerGroup
    entries: list[RoutedSequence] = field(default_factory=list)
    unfinished: list[RoutedSequence] = field(default_factory=list)  # those in the queue and those in prefill
    backlog: int = 0  # tokens that they lack
    num_blocks: int = 0  # that those in the queue will take

    def refresh(self) -> None:
        """To be called when somebody is about to be placed: plans have been made since."""
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
        """The next plan has no tokens left for somebody else: only who finds something here has a reason to stand."""
        return self.backlog >= self.group.max_num_batched_tokens

    def num_blocks_in_progress(self, hashes: list[bytes], num_cached_blocks: int) -> int:
        """Leading blocks that will be found once those who came before have been computed; hashes are chained."""
        most = num_cached_blocks
        for routed in self.unfinished:
            other = routed.sequence.block_hashes
            end = min(len(hashes), len(other))
            if end <= most or hashes[most] != other[most]:
                continue
            low, high = most + 1, end  # the first `low` are the same
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if hashes[middle - 1] == other[middle - 1] else (low, middle - 1)
            most = low
        return most

    def will_cache(self, first: bytes) -> bool:
        """Somebody came whose first block has this name."""
        return any(
            routed.sequence.block_hashes and routed.sequence.block_hashes[0] == first for routed in self.unfinished
        )

    def requeue(self, waiting: WaitingQueue) -> None:
        """All who stand here wait among the others again."""
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
    def __init__(
        self,
        waiting: WaitingQueue,
        groups: dict[int, WorkerGroup],
        acceptance: Acceptance,
    ) -> None:
        self._waiting, self._groups, self._policy = waiting, groups, waiting.policy
        self._acceptance = acceptance
        self._queues: dict[int, GroupQueue] = {}

    def requeue_all(self) -> None:
        """Nobody stands at a queue: those who did wait among the others again."""
        for queue in self._queues.values():
            queue.requeue(self._waiting)

    def route(self) -> list[WorkerGroup]:
        """Sends those who wait to queues, as far as there is room. Returns the groups that somebody was sent to."""
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
        """Who is next in this group: at its queue, or of all who wait if nobody has a place for him."""
        queue = self._queues.get(group.worker)
        if queue is not None:
            while queue.entries and not queue.entries[0].waits:
                queue.entries.pop(0)
            if queue.entries:
                return queue.entries[0].sequence
        return self._waiting.peek()

    def reserve(self, group: WorkerGroup, sequence: Sequence) -> None:
        """Others have given way to this choice in this group: it is not to take anybody's place elsewhere, too."""
        if len(self._groups) > 1 and not sequence.is_held:
            self._add(
                self._queue_of(group),
                sequence,
                sequence.num_tokens,
                group.kv_cache.num_blocks_to_take(sequence.num_tokens, _NOTHING, alone=not group.running),
            )

    def remove_group(self, group: WorkerGroup) -> None:
        """A group is lost: those at its queue wait for another."""
        queue = self._queues.pop(group.worker, None)
        if queue is not None:
            queue.requeue(self._waiting)

    def _next(self) -> Sequence | None:
        """Who is next, if he may be seated."""
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
        """The queue, and the tokens and blocks that are lacking there; None without room anywhere."""
        best, lowest = None, None
        known, size, first = sequence.num_tokens, 0, None
        near = _sibling_groups(sequence)
        own = max(1, known - sequence.request.num_prompt)  # what a sibling has not computed of it
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
        """Tokens that are lacking, those before them, and what is there.

        What somebody before computes for both counts for neither.
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
        """Those whom plan after plan passed over."""
        sent = queue.group.plan_clock.last_sent
        if queue.entries and sent - min(routed.since for routed in queue.entries) > MAX_PLANS_WAITED:
            queue.requeue(self._waiting)
            queue.refresh()


def _sibling_groups(sequence: Sequence) -> set[int]:
    """WorkerGroups where others of the same prompt run."""
    others = sequence.request.active_sequences
    if len(others) < 2:
        return set()
    return {c.last_run.worker for c in others if c.last_run is not None and c.phase is Phase.RUNNING}
