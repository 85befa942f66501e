"""The KV cache of one worker group: allocates blocks to sequences, caches full ones by hash, invalidates bad ones."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from blockyard.services.scheduler.kv_cache.block_pool import BlockPool
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher, PrefixMatch, find_in_window, find_prefix
from blockyard.services.scheduler.kv_cache.sliding_window import SlidingWindow
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.services.scheduler.sequences.requests import NEVER, BlockTable, RunningSequence, Sequence
from blockyard.shared.block_hashes import HASH_BYTES, split_hashes
from blockyard.shared.messages import Attached, BlockFetch, BlockSave, FullBlock, Geometry


@dataclass(slots=True)
class CacheStats:
    """Counters of all groups since the start of the scheduler. They never fall."""

    num_queries: int = 0  # tokens looked up in the prefix cache
    num_hits: int = 0  # tokens found there
    num_saved: int = 0  # blocks copied to host memory
    num_fetched: int = 0  # blocks copied back

    def on_query(self, num_tokens: int, num_found: int) -> None:
        self.num_queries += num_tokens
        self.num_hits += num_found

    def on_copies(self, num_saved: int, num_fetched: int) -> None:
        self.num_saved += num_saved
        self.num_fetched += num_fetched


class KVCacheManager:
    """Owns the blocks of a worker group and the block table of each of its sequences.

    A block is hashed, and can then be found, once a plan that fills it has been sent: plans run in order, so that a
    later plan may read it.
    """

    def __init__(
        self,
        geometry: Geometry,
        max_num_batched_tokens: int,
        plan_clock: PlanClock,
        hasher: BlockHasher,
        stats: CacheStats,
        watermark: float | None = None,
    ) -> None:
        """watermark: see `BlockPool`."""
        self.block_size = geometry.block_size
        self.blocks = BlockPool(
            geometry.num_blocks, geometry.block_size, plan_clock, geometry.num_host_blocks, watermark
        )
        self.window: SlidingWindow | None = None  # without one, every block is kept
        if geometry.window is not None:
            self.window = SlidingWindow(geometry.window, geometry.block_size, max_num_batched_tokens)
        self._hasher, self._stats = hasher, stats
        self._is_searched = hasher.enabled or geometry.num_host_blocks > 0
        self.hash_queue: deque[RunningSequence] = deque()  # with full blocks that are not hashed yet

    # lookup

    def find(self, sequence: Sequence) -> PrefixMatch:
        """The leading full blocks of a sequence that are cached. The block of its last token is never among them."""
        if not self._is_searched and not sequence.was_prefilled:
            return PrefixMatch()
        hashes = self._hasher.hashes(sequence, self.block_size, sequence.num_tokens)
        if not sequence.request.finds_prefix and not sequence.was_prefilled:
            return PrefixMatch()
        most = (sequence.num_tokens - 1) // self.block_size
        if self.window is not None:
            found = find_in_window(self.blocks, self.window, hashes[:most])
        elif most and self.blocks.holds(hashes[0]):
            found = find_prefix(self.blocks, hashes, most)
        else:
            found = PrefixMatch()
        num_found = found.num_blocks_found
        next_hash = hashes[num_found] if num_found < most else None
        found.complete(
            next_hash, num_found * self.block_size, is_query=self._hasher.enabled and not sequence.was_prefilled
        )
        return found

    def first_hash(self, sequence: Sequence) -> bytes | None:
        """Hash of a sequence's first full block; None if `find` cannot find it."""
        if sequence.num_tokens <= self.block_size:
            return None
        if not sequence.was_prefilled and (not self._is_searched or not sequence.request.finds_prefix):
            return None
        return self._hasher.hashes(sequence, self.block_size, sequence.num_tokens)[0]

    def may_have_cached(self, first_hash: bytes) -> bool:
        """Whether `find` may find anything for a sequence that begins with this hash."""
        return self.window is not None or self.blocks.holds(first_hash)

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Leading blocks that no token after the first `num_tokens` sees."""
        return 0 if self.window is None else self.window.num_skipped_blocks(num_tokens)

    # allocation

    def num_blocks_to_take(self, num_tokens: int, found: PrefixMatch, alone: bool) -> int:
        """Blocks that a sequence of `num_tokens` takes besides the ones found. `alone`: the group runs nothing else."""
        pool, num_held = self.blocks, found.num_skipped + len(found.blocks)
        if self.window is None:
            return pool.blocks_for(num_tokens) - num_held
        wanted = pool.blocks_for(self.window.initial_tokens(num_tokens, found.num_tokens)) - num_held
        if not alone:
            return wanted
        least = pool.blocks_for(found.num_tokens + 1) - num_held
        return max(least, min(wanted, pool.num_free - pool.num_free_of(found.blocks)))

    def num_blocks_lacking(self, num_tokens: int, found: PrefixMatch, alone: bool) -> int:
        """Blocks that are missing to start a sequence, with pending blocks counted as free."""
        needed = self.num_blocks_to_take(num_tokens, found, alone) + self.blocks.num_free_of(found.blocks)
        return needed - self.blocks.num_admissible

    def allocate(self, sequence: Sequence, num_blocks: int, found: PrefixMatch) -> BlockTable:
        """The table of a sequence that starts: the blocks found, then `num_blocks` free ones, checked by the caller."""
        pool, hosts = self.blocks, list[int]()
        if found.host_hashes:
            hosts = pool.host.pin(list(found.host_hashes.values()))  # `take` may evict others
        if found.copy_from is not None:
            pool.share([found.copy_from])  # until `on_plan_sent`: the plan that is being built reads it
        if found.blocks:
            pool.share(found.blocks)
        fresh = pool.take(num_blocks)
        blocks = found.blocks + fresh
        if hosts:
            fetched = fresh[: len(hosts)]
            pool.host.fetch(hosts, fetched)
            pool.index.insert_all(fetched, list(found.host_hashes.values()))
            if next(iter(found.host_hashes)) < found.num_skipped + len(found.blocks):  # they alternate
                here, there = iter(found.blocks), iter(fetched)
                order = range(found.num_skipped, found.num_blocks_found)
                blocks = [next(there if i in found.host_hashes else here) for i in order] + fresh[len(hosts) :]
        if found.is_query:
            self._stats.on_query(sequence.num_tokens, found.num_tokens)
        skipped = blocks[:1] * found.num_skipped  # placeholders: positions count them and no kernel reads them
        blocks = skipped + blocks
        table = BlockTable(
            self.block_size,
            blocks,
            capacity=len(blocks) * self.block_size,
            num_cached=found.num_blocks_found,
            num_freed=found.num_skipped,
            copied_from=found.copy_from,
            num_hashed=found.num_blocks_found,
        )
        if self._hasher.enabled:
            table.set_hashed(found.num_blocks_found)
        return table

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> tuple[dict[int, bytes], list[int]]:
        """What this group lacks to continue after `num_tokens` tokens that another group computes.

        Returns the hashes of full blocks by their index in the block table, and the blocks that are cached here.
        Blocks outside the sliding window, and in host memory, are in neither.
        """
        hashes = self._hasher.hashes(sequence, self.block_size, num_tokens)
        end = num_tokens // self.block_size
        first = self.num_skipped_blocks(end * self.block_size)
        here = [*map(self.blocks.index.get, hashes[first:end])]
        in_host = self.blocks.host.has
        missing = {i: hashes[i] for i, block in enumerate(here, first) if block is None and not in_host(hashes[i])}
        return missing, [block for block in here if block is not None]

    def num_blocks_to_receive(self, num_tokens: int, num_missing: int) -> int:
        """At most so many are missing to continue after `num_tokens` tokens, of which `num_missing` are not cached."""
        end = num_tokens // self.block_size
        first = self.num_skipped_blocks(end * self.block_size)
        return min(end - first, self.blocks.blocks_for(num_missing))

    def append_block(self, running: RunningSequence) -> int | None:
        """One more block for a sequence; None if no block is free."""
        if self.window is not None:
            self._free_outside_window(running, self.window)
        block = self.blocks.take_one()
        if block is not None:
            running.table.extend([block])
        return block

    def append_block_to_each(self, sequences: list[RunningSequence]) -> list[int]:
        """One more block for each of these. The caller has checked that so many are free."""
        blocks = self.blocks.take(len(sequences))
        for running, block in zip(sequences, blocks, strict=True):
            running.table.extend([block])
        return blocks

    def extend(self, running: RunningSequence, num_tokens: int) -> list[int]:
        """Blocks for the first `num_tokens` tokens of a sequence, or as many as are free. Returns the new blocks."""
        if self.window is not None:
            self._free_outside_window(running, self.window)
        missing = self.blocks.blocks_for(num_tokens) - len(running.table.blocks)
        blocks = self.blocks.take(min(missing, self.blocks.num_free))
        running.table.extend(blocks)
        return blocks

    def free(self, running: RunningSequence) -> None:
        """Gives up the blocks of a sequence that stops running. Full ones are hashed first and stay cached."""
        table = running.table
        if table.next_hash_at != NEVER:
            self._hash_computed(running)
        table.next_hash_at = NEVER
        first = table.num_freed
        self.blocks.release(table.blocks[first:], running.sequence.block_hashes[first : table.num_hashed])

    def _free_outside_window(self, running: RunningSequence, window: SlidingWindow) -> None:
        table = running.table
        if table.next_hash_at != NEVER:
            self._hash_computed(running)
        end = min(window.num_skipped_blocks(running.num_computed_tokens), len(table.blocks))
        if end > table.num_freed:
            hashes = running.sequence.block_hashes[table.num_freed : min(end, table.num_hashed)]
            self.blocks.release(table.free_first(end), hashes)

    # hashing

    def blocks_filled_by_plan(self, running: RunningSequence) -> dict[bytes, int]:
        """Blocks by hash that a prefill fills with the tokens scheduled so far, for `on_plan_sent`."""
        table = running.table
        end = min(running.num_scheduled_tokens, running.prefill_end) // self.block_size
        first = table.num_hashed
        if table.next_hash_at == NEVER or end <= first:
            return {}
        table.set_hashed(end)
        return dict(zip(running.sequence.block_hashes[first:end], table.blocks[first:end], strict=True))

    def on_plan_sent(self, new_hashes: dict[bytes, int], copy_sources: list[int]) -> None:
        """A plan was sent that fills these blocks, and that copies others, which `allocate` has kept for it."""
        if copy_sources:
            self.blocks.release(copy_sources, ())  # not free before the plan's result
        if new_hashes:
            self.blocks.index.insert_each(list(new_hashes.values()), list(new_hashes))

    def mark_block_full(self, running: RunningSequence) -> None:
        """A result says that a sequence has computed up to `next_hash_at`: its next block is full."""
        if not running.table.is_hash_due:
            running.table.is_hash_due = True
            self.hash_queue.append(running)

    def mark_blocks_full(self, sequences: list[RunningSequence]) -> None:
        """Marks blocks of the decode batch full: see `mark_block_full`. A sequence comes here once for each block."""
        self.hash_queue.extend(sequences)

    def hash_full_blocks(self) -> None:
        """Hashes the blocks marked as full, a few in each plan, because many may fill up in the same step."""
        queue = self.hash_queue
        for _ in range(min(len(queue), len(queue) // 8 + 16)):
            running = queue.popleft()
            running.table.is_hash_due = False
            if running.num_computed_tokens >= running.table.next_hash_at:
                self._hash_computed(running)

    def hash_before_preempt(self, running: RunningSequence) -> None:
        """Hashes the blocks of a sequence that only it can find: it is about to wait, and may find them later."""
        if self._is_searched and not self._hasher.enabled:
            self._hash_computed(running)

    def drop_private(self, sequence: Sequence) -> None:
        """Drops the cached blocks of a sequence that has ended, where no other request can find them."""
        if self._hasher.enabled or not sequence.block_hashes:
            return
        request, index = sequence.request, self.blocks.index
        hashes = sequence.block_hashes[request.num_prompt // sequence.hash_block_size if request.sequences else 0 :]
        self.blocks.invalidate([block for block_hash in hashes if (block := index.get(block_hash)) is not None])
        self.blocks.host.remove(hashes)

    def _hash_computed(self, running: RunningSequence) -> None:
        table, sequence, size = running.table, running.sequence, self.block_size
        end = max(table.num_hashed, running.num_computed_tokens // size)
        hashes = self._hasher.hashes(sequence, size, end * size)
        insert, blocks = self.blocks.index.insert, table.blocks
        for i in range(max(table.num_hashed, table.num_freed), end):
            insert(blocks[i], hashes[i])
        table.set_hashed(end)

    # the worker

    def restore(self, frame: Attached) -> None:
        """Takes over what the blocks of a newly attached worker hold."""
        if not self._hasher.enabled:
            return
        for pool, blocks, hashes in (
            (self.blocks, frame.block_ids, frame.block_hashes),
            (self.blocks.host, frame.host_block_ids, frame.host_block_hashes),
        ):
            if len(hashes) == len(blocks) * HASH_BYTES and all(0 <= b < pool.num_ids for b in blocks):
                pool.restore(blocks, split_hashes(hashes))

    def take_plan_changes(self) -> tuple[list[FullBlock], list[BlockSave], list[BlockFetch]]:
        """What the plan that is being sent tells the worker: new hashes, copies to host memory, copies back."""
        index, host = self.blocks.index, self.blocks.host
        if not (index.new or host.saves or host.fetches):
            return [], [], []
        new = index.take_new()
        if any(map(index.free_queue.batch_of, new)):
            self.blocks.keep_named(new)
        saves, fetches = list[BlockSave](), list[BlockFetch]()
        if host.saves or host.fetches:
            saves, fetches = host.take()
            self._stats.on_copies(len(saves), len(fetches))
        return [*map(FullBlock, new.keys(), new.values())] if new else [], saves, fetches

    # invalidation

    def drop_cached(self, block_hash: bytes) -> None:
        """The block of this hash cannot be trusted: no other sequence finds it, here or in host memory."""
        block = self.blocks.index.get(block_hash)
        if block is not None:
            self.blocks.invalidate([block])
        self.blocks.host.remove([block_hash])

    def invalidate_failed(self, failed: RunningSequence, active: Iterable[RunningSequence]) -> list[RunningSequence]:
        """A sequence failed and its worker zeroed its blocks: drops them, and all that was computed from them.

        `active`: all sequences with results to come. Returns the ones that read the blocks.
        """
        readers = self._invalidate_readers(set(failed.table.blocks[failed.table.num_cached :]), active)
        self.blocks.invalidate(failed.table.blocks)
        failed.table.invalidate()
        return [running for running in readers if running is not failed]

    def invalidate_unfetched(self, blocks: list[int], active: Iterable[RunningSequence]) -> list[RunningSequence]:
        """Invalidates blocks that a worker could not fetch from host memory: see `invalidate_failed`."""
        index = self.blocks.index
        hashes = [block_hash for block in blocks if (block_hash := index.hash_of(block)) is not None]
        readers = self._invalidate_readers(set(blocks), active)
        self.blocks.invalidate(blocks)
        self.blocks.host.remove(hashes)
        return readers

    def _invalidate_readers(self, bad: set[int], active: Iterable[RunningSequence]) -> list[RunningSequence]:
        """Sequences that read `bad` blocks, or blocks computed from them; what they computed is dropped too."""
        left = {id(running): running for running in active}
        readers: list[RunningSequence] = []
        while found := [running for running in left.values() if running.table.reads_any(bad)]:
            for running in found:
                del left[id(running)]
                own = running.table.blocks[running.table.num_cached :]
                bad.update(own)
                self.blocks.invalidate(own)
                running.table.invalidate()
            readers += found
        return readers
