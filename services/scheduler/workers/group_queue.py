"""The sequences that are routed to one worker group and wait for its next plans."""

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Key, Phase, Sequence
from blockyard.services.scheduler.transfers.handovers import Handovers

RUNNING_TOKENS = 128  # the cost of a running sequence, in prompt tokens: it will decode for a while
ADAPTER_TOKENS = 1024  # the cost of a place for an adapter, in prompt tokens: another one may have to leave it

_by_key = attrgetter("key")


def cost(num_tokens: int, backlog: int, num_running: int) -> tuple[int, int]:
    """The cost of a group for a sequence. `num_tokens` are to be computed for it there, and `backlog` before it."""
    return (num_tokens + backlog + RUNNING_TOKENS * num_running, num_running)


def place_cost(group: WorkerGroup, adapter: int | None) -> int:
    """What a sequence costs more in a group without a place for its adapter, in prompt tokens."""
    return 0 if adapter is None or group.adapters.is_placed(adapter) else ADAPTER_TOKENS


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
    counted_in: int = 0  # round of the router in which the counts were brought up to date

    def refresh(self, number: int) -> None:
        """Brings the counts up to date: plans were built since. `number`: the round of the router."""
        self.counted_in = number
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

    @property
    def ends_with_batch_line(self) -> bool:
        return bool(self.entries) and self.entries[-1].sequence.request.is_batch_line

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

    def find(self, sequence: Sequence) -> tuple[int, int, PrefixMatch]:
        """Tokens to compute, tokens to compute before them, and the cached prefix.

        Blocks that an unfinished sequence computes for both are counted in neither number.
        """
        found, size, coming = self.group.kv_cache.find(sequence), self.group.kv_cache.block_size, 0
        if found.next_hash is not None:
            num_cached_blocks = found.num_tokens // size
            coming = (self.num_blocks_in_progress(sequence.block_hashes, num_cached_blocks) - num_cached_blocks) * size
        num_tokens = sequence.num_tokens - found.num_tokens - coming
        return max(1, num_tokens), max(0, self.backlog - coming), found

    def requeue(self, waiting: WaitingQueue, handovers: Handovers) -> None:
        """Puts the waiting sequences back into the order of the waiting queue."""
        for routed in self.entries:
            if routed.waits:
                if routed.sequence.handover is not None:
                    handovers.drop(routed.sequence)
                waiting.requeue(routed.sequence)
        self.entries = []

    def requeue_batch_lines(self, waiting: WaitingQueue) -> None:
        """As `requeue`, of lines of batch files alone, and not of those whose prompts are computed already."""
        kept = []
        for routed in self.entries:
            if routed.waits and routed.sequence.request.is_batch_line and routed.sequence.handover is None:
                waiting.requeue(routed.sequence)
            else:
                kept.append(routed)
        self.entries = kept

    def add(self, routed: RoutedSequence) -> None:
        insort(self.entries, routed, key=_by_key)
        self.unfinished.append(routed)
        self.backlog += routed.num_tokens
        self.num_blocks += routed.num_blocks


def sibling_groups(sequence: Sequence) -> set[int]:
    """Groups where other sequences of the request run, and stay."""
    others = sequence.request.active_sequences
    if len(others) < 2:
        return set()
    runs = [c.last_run for c in others if c.last_run is not None and c.phase is Phase.RUNNING]
    return {running.worker for running in runs if not running.leaves_prefilled}
