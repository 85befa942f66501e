"""Blocks in host memory, of one worker group: they keep what is reclaimed from the device, by name."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from blockyard.services.scheduler.kv_cache.id_pool import Horizon, IdPool
from blockyard.shared.messages import BlockFetch, BlockSave


class HostTier:
    """Which host block holds what. The least recently used is given up first.

    Copies ride in the plan that is being made. Plans run in order, so that what one saves it may fetch itself, after
    its saves. A host block with a copy in flight keeps its name and its bytes until that plan's result is in.
    """

    def __init__(self, num_blocks: int, horizon: Horizon) -> None:
        self.num_saved = 0
        self.num_fetched = 0
        self._horizon = horizon
        self._ids = IdPool(num_blocks, horizon)
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.get = self._block_of.get  # the host block of a name
        self.has = self._block_of.__contains__
        self._copied_by = [0] * num_blocks  # the last plan that copies each host block
        self._saves: list[BlockSave] = []
        self._fetches: list[BlockFetch] = []

    @property
    def num_ids(self) -> int:
        return self._ids.num_ids

    @property
    def num_used(self) -> int:
        return len(self._block_of)

    def hold(self, names: Sequence[bytes]) -> list[int]:
        """The plan that is being made will fetch these, which were found: they stay. A chain's names, in its order.

        Returns the host blocks.
        """
        self._touch(reversed(names))  # a leaf is of no use without its parents: it goes first
        hosts = [*map(self._block_of.__getitem__, names)]
        number = self._horizon.sent + 1
        for host in hosts:
            self._copied_by[host] = number
        return hosts

    def fetch(self, hosts: Iterable[int], blocks: Iterable[int]) -> None:
        """Host blocks that are held, into blocks of the device that are reserved for them."""
        self._fetches += map(BlockFetch, hosts, blocks)

    def save_all(self, blocks: list[int], names: list[bytes]) -> None:
        """As `save`, in the order in which they are given up."""
        if not self._ids.num_ids:
            return
        try:
            self._touch(names)  # most often all of them are here: what is reclaimed has been fetched or saved before
        except KeyError:
            known = self._block_of.keys() & names
            self._touch([name for name in names if name in known])  # first, or others might take their places
            for block, name in zip(blocks, names, strict=True):
                if name not in known:
                    self.save(block, name)

    def save(self, block: int, name: bytes) -> None:
        """A block of the device is about to be written by somebody else. It is lost where there is no room."""
        if name in self._block_of:
            self._block_of.move_to_end(name)
            return
        host = self._ids.take_one() if self._ids.num_free else self._give_up()
        if host is not None:
            self._block_of[name] = host
            self._copied_by[host] = self._horizon.sent + 1
            self._saves.append(BlockSave(block, host, name))

    def take(self) -> tuple[list[BlockSave], list[BlockFetch]]:
        """What the plan that is being sent has to copy."""
        saves, self._saves = self._saves, []
        fetches, self._fetches = self._fetches, []
        self.num_saved += len(saves)
        self.num_fetched += len(fetches)
        return saves, fetches

    def forget(self, names: Iterable[bytes]) -> None:
        """Nobody is to find these any more. Not to be called while a plan is made."""
        gone = [block for name in names if (block := self._block_of.pop(name, None)) is not None]
        if gone:
            left = set(gone)
            self._saves = [save for save in self._saves if save.host not in left]
            self._ids.release(gone)

    def clear(self) -> None:
        self.forget(list(self._block_of))

    def adopt(self, blocks: list[int], names: list[bytes]) -> None:
        """What the memory of a worker that was just attached holds, oldest first."""
        self._block_of.update(zip(names, blocks, strict=True))
        self._ids.remove(list(self._block_of.values()))

    def settle(self) -> None:
        """To be called when the horizon's `done` has moved."""
        self._ids.settle()

    def _touch(self, names: Iterable[bytes]) -> None:
        deque(map(self._block_of.move_to_end, names), maxlen=0)  # thousands at a time, at C's speed

    def _give_up(self) -> int | None:
        if not self._block_of:
            return None
        name, block = next(iter(self._block_of.items()))
        if self._copied_by[block] > self._horizon.done:
            return None
        del self._block_of[name]
        return block
