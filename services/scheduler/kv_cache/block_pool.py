"""KV blocks of one worker group: shared by count, and findable by what they hold."""

from collections.abc import Sequence
from itertools import filterfalse

from blockyard.services.scheduler.kv_cache.host_tier import HostTier
from blockyard.services.scheduler.kv_cache.id_pool import Horizon, IdPool
from blockyard.services.scheduler.kv_cache.prefix_index import PrefixIndex


class BlockPool:
    """Whoever holds blocks keeps their table; the pool knows how many hold each, and which are free.

    Each block is in one place: used (held by somebody), bare (in `bare`, free or at rest) or kept (in `index`, idle
    or cooling). Kept ones that are idle count as free. What is reclaimed of them goes to `host`.
    """

    def __init__(self, num_blocks: int, block_size: int, horizon: Horizon, num_host_blocks: int = 0) -> None:
        self.num_ids = num_blocks
        self.block_size = block_size  # tokens
        self.bare = IdPool(num_blocks, horizon)
        self.index = PrefixIndex(num_blocks, horizon)
        self._shelf = self.index.shelf
        self.host = HostTier(num_host_blocks, horizon)
        self._holders = [0] * num_blocks
        self._watermark = max(1, num_blocks // 100)

    @property
    def num_free(self) -> int:
        return self.bare.num_free + self._shelf.num_idle

    @property
    def num_resting(self) -> int:
        return self.bare.num_resting + self._shelf.num_cooling

    @property
    def num_used(self) -> int:
        return self.num_ids - self.num_free - self.num_resting

    @property
    def num_tokens(self) -> int:
        return self.num_ids * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_admissible(self) -> int:
        """What a newcomer may take beside others, once nothing rests any more."""
        return self.num_free + self.num_resting - self._watermark

    def admits(self, num_blocks: int, found: list[int], alone: bool) -> bool:
        """Whether a newcomer may take so many beside those found for it.

        Beside others it leaves a little, or it is the next to be preempted.
        """
        room = self.num_free - (0 if alone else self._watermark)
        if num_blocks + len(found) <= room:  # most often: then nobody needs to know which of them are idle
            return True
        return num_blocks <= room and num_blocks + self._shelf.num_idle_of(found) <= room

    def holds(self, name: bytes) -> bool:
        return self.index.get(name) is not None or self.host.get(name) is not None

    def take_one(self) -> int | None:
        block = self.bare.take_one()
        if block is None:
            block = self._reclaim()
            if block is None:
                return None
        self._holders[block] = 1
        return block

    def take(self, count: int) -> list[int]:
        """The caller has looked at `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = self.bare.take(min(count, self.bare.num_free))
        if len(taken) < count:
            blocks, names = self.index.reclaim_all(count - len(taken))
            self.host.save_all(blocks, names)
            taken += blocks
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more holds these, which were found in the index."""
        holders = self._holders
        self._shelf.take([*filterfalse(holders.__getitem__, blocks)])
        for block in blocks:
            holders[block] += 1

    def release(self, blocks: list[int], names: Sequence[bytes]) -> None:
        """One less holds these. `names` are of the first of them, as far as they are full once sent plans have run.

        The leaf is given up before its parents: it is of no use without them.
        """
        holders, index, has = self._holders, self.index, self.index.has
        bare: list[int] = []
        kept: list[int] = []  # in the order in which they rest
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            holders[block] = left = holders[block] - 1
            if left:
                continue
            if has(block):
                kept.append(block)
                continue
            if i < len(names):
                self._shelf.put(kept)  # before the one that is touched
                kept = []
                if index.touch(names[i]) is None and index.put(block, names[i]):
                    kept.append(block)
                    continue
            bare.append(block)
        self._shelf.put(kept)
        if bare:
            self.bare.release(bare)

    def spoil(self, blocks: list[int]) -> None:
        """What these hold is not what their names say."""
        self.bare.release([block for block in blocks if self.index.drop(block)])

    def adopt(self, blocks: list[int], names: list[bytes]) -> None:
        """Of a worker that was just attached."""
        self.bare.remove(self.index.adopt(blocks, names))

    def settle(self) -> None:
        """To be called when the horizon's `done` has moved."""
        self.bare.settle()
        self._shelf.settle()
        self.host.settle()

    def _reclaim(self) -> int | None:
        given_up = self.index.reclaim()
        if given_up is None:
            return None
        self.host.save(*given_up)
        return given_up[0]
