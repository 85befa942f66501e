"""The host memory of one worker group: it keeps blocks that are evicted from the device."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from blockyard.services.scheduler.kv_cache.id_pool import IdPool
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.shared.messages import BlockFetch, BlockSave


class HostTier:
    """Which host block holds which hash. The least recently used block is evicted first.

    Copies are part of the plan that is being built. Plans run in order, so that a plan may fetch a block that it saves
    itself: saves come first. A host block with a copy in flight keeps its hash and contents until the plan's result.
    """

    def __init__(self, num_blocks: int, plan_clock: PlanClock) -> None:
        self._plan_clock = plan_clock
        self._ids = IdPool(num_blocks, plan_clock)
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.get = self._block_of.get  # the host block with a hash
        self.has = self._block_of.__contains__
        self._copied_by = [0] * num_blocks  # the last plan that copies each host block
        self.saves: list[BlockSave] = []
        self.fetches: list[BlockFetch] = []

    @property
    def num_ids(self) -> int:
        return self._ids.num_ids

    @property
    def num_used(self) -> int:
        return len(self._block_of)

    def pin(self, hashes: Sequence[bytes]) -> list[int]:
        """Keeps a chain of blocks for the plan that is being built. Returns the host blocks."""
        self._touch(reversed(hashes))  # the last block of a chain is evicted first
        hosts = [*map(self._block_of.__getitem__, hashes)]
        number = self._plan_clock.last_sent + 1
        for host in hosts:
            self._copied_by[host] = number
        return hosts

    def fetch(self, hosts: Iterable[int], blocks: Iterable[int]) -> None:
        """The plan that is being built copies pinned host blocks into these device blocks."""
        self.fetches += map(BlockFetch, hosts, blocks)

    def save_all(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Saves several blocks in the order of eviction: see `save`."""
        if not self._ids.num_ids:
            return
        try:
            self._touch(hashes)  # the usual case: all of them were fetched or saved before
        except KeyError:
            known = self._block_of.keys() & hashes
            self._touch(
                [block_hash for block_hash in hashes if block_hash in known]
            )  # first, or new blocks might evict them
            for block, block_hash in zip(blocks, hashes, strict=True):
                if block_hash not in known:
                    self.save(block, block_hash)

    def save(self, block: int, block_hash: bytes) -> None:
        """Copies a device block that is about to be overwritten to host memory, if there is room."""
        if block_hash in self._block_of:
            self._block_of.move_to_end(block_hash)
            return
        host = self._ids.take_one() if self._ids.num_free else self._evict()
        if host is not None:
            self._block_of[block_hash] = host
            self._copied_by[host] = self._plan_clock.last_sent + 1
            self.saves.append(BlockSave(block, host, block_hash))

    def take(self) -> tuple[list[BlockSave], list[BlockFetch]]:
        """The copies of the plan that is being sent."""
        saves, self.saves = self.saves, []
        fetches, self.fetches = self.fetches, []
        return saves, fetches

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Drops these blocks. Not to be called while a plan is built."""
        gone = [block for block_hash in hashes if (block := self._block_of.pop(block_hash, None)) is not None]
        if gone:
            left = set(gone)
            self.saves = [save for save in self.saves if save.host not in left]
            self._ids.release(gone)

    def restore(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Takes over the host blocks of a newly attached worker, oldest first."""
        self._block_of.update(zip(hashes, blocks, strict=True))
        self._ids.remove(list(self._block_of.values()))

    def free_pending(self) -> None:
        """To be called after each completed plan."""
        self._ids.free_pending()

    def _touch(self, hashes: Iterable[bytes]) -> None:
        deque(map(self._block_of.move_to_end, hashes), maxlen=0)  # thousands at a time, at C speed

    def _evict(self) -> int | None:
        if not self._block_of:
            return None
        block_hash, block = next(iter(self._block_of.items()))
        if self._copied_by[block] > self._plan_clock.last_completed:
            return None
        del self._block_of[block_hash]
        return block
