"""Prefix caching: what of a choice's tokens need not be computed, and what others will find of them."""

from dataclasses import dataclass, field

from blockyard.services.scheduler.kv_cache.block_hashes import BlockHasher
from blockyard.services.scheduler.sequences.requests import NEVER, RunningSequence, Sequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup
from blockyard.shared.block_hashes import HASH_BYTES, split_hashes
from blockyard.shared.messages import Attached, FullBlock


@dataclass(slots=True)
class PrefixMatch:
    """What there is of a waiting choice's leading blocks."""

    blocks: list[int] = field(default_factory=list)  # those on the device, in their order, behind `first`
    next_hash: bytes | None = None  # of the first block that is to be computed, if that could be found at all
    is_query: bool = False  # the choice asked
    num_tokens: int = 0  # that need not be computed
    copy_from: int | None = None  # block that holds the last of those, and is to be copied
    host_hashes: dict[int, bytes] = field(
        default_factory=dict
    )  # places, between or behind those, of what is to be fetched
    host_blocks: list[int] = field(
        default_factory=list
    )  # where in host memory, once it is decided that they are fetched
    num_skipped: int = 0  # leading places that are behind the model's window: nothing is needed there

    @property
    def num_blocks_found(self) -> int:
        """Leading blocks that need not be computed."""
        return self.num_skipped + len(self.blocks) + len(self.host_hashes)


class PrefixCache:
    """Names blocks and finds them; which blocks there are is each group's own affair."""

    def __init__(self, scope: str, enabled: bool) -> None:
        self.num_queries = 0  # tokens that were looked up
        self.num_hits = 0  # tokens that were found
        self._hasher, self._enabled = BlockHasher(scope, enabled), enabled

    def find(self, group: WorkerGroup, sequence: Sequence) -> PrefixMatch:
        """Leading full blocks of a choice that have been computed. Its last known token never is among them."""
        if not (self._enabled or group.blocks.host.num_ids):
            return PrefixMatch()
        hashes = self._hasher.hashes(sequence, group.blocks.block_size, sequence.num_tokens)
        if sequence.request.frame.sampling.num_prompt_logprobs is not None:
            return PrefixMatch()  # they are computed along with the KV
        most = (sequence.num_tokens - 1) // group.blocks.block_size
        if group.window.size is not None:
            found = _find_window(group, hashes[:most])
        else:
            found = PrefixMatch(group.blocks.index.find(hashes, most))
            if len(found.blocks) < most and group.blocks.host.num_used:
                _find_in_host(group, hashes[:most], found)
        found.is_query = self._enabled
        num_cached_blocks = found.num_blocks_found
        found.num_tokens = num_cached_blocks * group.blocks.block_size
        found.next_hash = hashes[num_cached_blocks] if num_cached_blocks < most else None
        return found

    def first_hash(self, group: WorkerGroup, sequence: Sequence) -> bytes | None:
        """Of a choice's first full block, if that could be found."""
        size = group.blocks.block_size
        if not (self._enabled or group.blocks.host.num_ids) or sequence.num_tokens <= size:
            return None
        if sequence.request.frame.sampling.num_prompt_logprobs is not None:
            return None
        return self._hasher.hashes(sequence, size, sequence.num_tokens)[0]

    def on_scheduled(self, group: WorkerGroup, running: RunningSequence, found: PrefixMatch) -> None:
        """The choice has its seat, with what was found."""
        size = group.blocks.block_size
        sequence = running.sequence
        if found.host_hashes:
            _fetch(group, running, found)
        if found.num_skipped:
            running.num_freed_blocks = found.num_skipped
            running.blocks[:0] = running.blocks[:1] * found.num_skipped
            running.capacity += found.num_skipped * size
        running.num_cached_blocks = running.num_hashed = found.num_blocks_found
        running.num_scheduled_tokens = running.num_computed_tokens = found.num_tokens
        running.copied_from = found.copy_from
        if self._enabled:
            running.next_hash_at = (running.num_hashed + 1) * size
        if found.is_query:
            self.num_queries += sequence.num_tokens
            self.num_hits += running.num_computed_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(running.num_computed_tokens, sequence.request.num_prompt)

    def blocks_filled_by_plan(self, group: WorkerGroup, running: RunningSequence) -> dict[bytes, int]:
        """Blocks by block_hash that a plan will fill which takes a seat in prefill as far as it is granted now."""
        size = group.blocks.block_size
        end = min(running.num_scheduled_tokens, running.prefill_end) // size
        if running.next_hash_at == NEVER or end <= running.num_hashed:
            return {}
        first, running.num_hashed = running.num_hashed, end
        running.next_hash_at = (end + 1) * size
        return dict(zip(running.sequence.block_hashes[first:end], running.blocks[first:end], strict=True))

    def mark_block_full(self, group: WorkerGroup, running: RunningSequence) -> None:
        """Called when results show that a sequence outside the decode batch has filled a block."""
        if not running.is_hash_due:
            running.is_hash_due = True
            group.hash_queue.append(running)

    def hash_full_blocks(self, group: WorkerGroup) -> None:
        """Names what has been filled. Some seats a plan: they may all fill a block in the same step."""
        due = group.hash_queue
        for _ in range(min(len(due), len(due) // 8 + 16)):
            running = due.popleft()
            running.is_hash_due = False
            if running.num_computed_tokens >= running.next_hash_at:
                self._hash_computed(group, running)

    def hash_before_free(self, group: WorkerGroup, running: RunningSequence) -> None:
        """A seat is about to be vacated: hashes what has not been named of it."""
        if running.next_hash_at != NEVER:
            self._hash_computed(group, running)

    def hash_before_preempt(self, group: WorkerGroup, running: RunningSequence) -> None:
        """A seat is about to be preempted: what is not for others gets hashes for when its choice comes back."""
        if not self._enabled and group.blocks.host.num_ids:
            self._hash_computed(group, running)

    def drop_private(self, group: WorkerGroup, sequence: Sequence) -> None:
        """A choice has ended: where blocks are not for others, nobody will ask for its own again."""
        if self._enabled or not sequence.block_hashes:
            return
        request, index = sequence.request, group.blocks.index
        hashes = sequence.block_hashes[request.num_prompt // sequence.hash_block_size if request.sequences else 0 :]
        group.blocks.invalidate([block for block_hash in hashes if (block := index.get(block_hash)) is not None])
        group.blocks.host.remove(hashes)

    def _hash_computed(self, group: WorkerGroup, running: RunningSequence) -> None:
        size = group.blocks.block_size
        sequence = running.sequence
        end = max(running.num_hashed, running.num_computed_tokens // size)
        hashes = self._hasher.hashes(sequence, size, end * size)
        put, blocks = group.blocks.index.insert, running.blocks
        for i in range(max(running.num_hashed, running.num_freed_blocks), end):
            put(blocks[i], hashes[i])
        running.num_hashed = end
        running.next_hash_at = (end + 1) * size

    def restore(self, group: WorkerGroup, frame: Attached) -> None:
        """A worker that was attached says what its blocks hold."""
        hashes, blocks = frame.block_hashes, frame.block_ids
        fits = len(hashes) == len(blocks) * HASH_BYTES and all(0 <= b < group.blocks.num_ids for b in blocks)
        if self._enabled and fits:
            group.blocks.restore(blocks, split_hashes(hashes))
        host, hashes = frame.host_block_ids, frame.host_block_hashes
        fits = len(hashes) == len(host) * HASH_BYTES and all(0 <= b < group.blocks.host.num_ids for b in host)
        if self._enabled and fits:
            group.blocks.host.restore(host, split_hashes(hashes))

    def take_new_cached_blocks(self, group: WorkerGroup) -> list[FullBlock]:
        """What is to be told with the next plan: full once that has run."""
        new = group.blocks.index.take_new()
        return [*map(FullBlock, new.keys(), new.values())] if new else []


def _find_window(group: WorkerGroup, hashes: list[bytes]) -> PrefixMatch:
    """The most that a choice may begin with where only its window's blocks are needed."""
    on_device, in_host = group.blocks.index.get, group.blocks.host.get
    num_cached_blocks, first = group.window.longest_hit(
        hashes, lambda n: on_device(n) is not None or in_host(n) is not None
    )
    found = PrefixMatch(num_skipped=first)
    for place in range(first, num_cached_blocks):
        if (block := on_device(hashes[place])) is not None:
            found.blocks.append(block)
        else:
            found.host_hashes[place] = hashes[place]
    return found


def _find_in_host(group: WorkerGroup, hashes: list[bytes], found: PrefixMatch) -> None:
    """Goes on, block by block, where the device has no more of a chain from its beginning."""
    on_device, in_host, host = group.blocks.index.get, group.blocks.host.get, found.host_hashes
    start = len(found.blocks)
    if in_host(hashes[start]) is None:
        return
    rest = hashes[start:]
    if group.blocks.index.has_none(rest):  # most often: then it is one look at all, at C's speed
        there = [*map(group.blocks.host.has, rest)]
        end = there.index(False) if False in there else len(there)
        found.host_hashes = dict(zip(range(start, start + end), rest[:end], strict=True))
        return
    for place in range(start, len(hashes)):
        block_hash = hashes[place]
        if (block := on_device(block_hash)) is not None:
            found.blocks.append(block)
        elif in_host(block_hash) is not None:
            host[place] = block_hash
        else:
            return


def _fetch(group: WorkerGroup, running: RunningSequence, found: PrefixMatch) -> None:
    """Of the seat's own blocks, behind those that were found, the first ones are filled from host memory."""
    num_active = len(found.blocks)
    reserved = running.blocks[num_active : num_active + len(found.host_hashes)]
    if next(iter(found.host_hashes)) < found.num_skipped + num_active:  # some stand between those that are here
        here, fresh = iter(running.blocks[:num_active]), iter(reserved)
        places = range(found.num_skipped, found.num_blocks_found)
        table = [next(fresh if place in found.host_hashes else here) for place in places]
        running.blocks[: len(table)] = table
    group.blocks.host.fetch(found.host_blocks, reserved)
    group.blocks.index.insert_all(reserved, list(found.host_hashes.values()))
