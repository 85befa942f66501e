"""Which blocks are full under which name: what a scheduler that attaches gets to know."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from blockyard.shared.messages import BlockSave, FullBlock


class BlockNames:
    """A name is learnt when the plan that filled its block has completed, and lost when the block is written again.

    Plans name blocks before it is known that their slot failed: those of a failed slot are barred until it ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self._named = np.zeros(num_blocks, np.bool_)
        self._names: dict[int, bytes] = {}
        self._barred: dict[int, set[int]] = {}  # by slot
        self._host: dict[int, bytes] = {}  # of blocks in host memory

    def learn(self, names: Iterable[FullBlock]) -> None:
        barred: set[int] = set().union(*self._barred.values()) if self._barred else set()
        for entry in names:
            if 0 <= entry.block < len(self._named) and entry.block not in barred:
                self._named[entry.block] = True
                self._names[entry.block] = entry.block_hash

    def forget(self, blocks: npt.NDArray[np.int64]) -> None:
        hit = blocks[self._named[blocks]]
        if len(hit):
            self._named[hit] = False
            for block in hit.tolist():
                self._names.pop(block, None)

    def forget_all(self) -> None:
        """Blocks in host memory too."""
        self._named[:] = False
        self._names.clear()
        self._host.clear()

    def bar(self, slot: int, blocks: list[int]) -> None:
        """This slot failed: its blocks do not hold what plans say."""
        known = [block for block in blocks if 0 <= block < len(self._named)]
        self.forget(np.array(known, np.int64))
        self._barred[slot] = set(known)

    def admit(self, slot: int) -> None:
        self._barred.pop(slot, None)

    def admit_all(self) -> None:
        self._barred.clear()

    def saved(self, saves: Iterable[BlockSave], good: Iterable[BlockSave]) -> None:
        """Blocks of host memory are overwritten; the good ones hold what they are called."""
        for save in saves:
            self._host.pop(save.host, None)
        self._host.update((save.host, save.block_hash) for save in good)

    def in_host(self, host: int) -> bool:
        return host in self._host

    def host_listed(self) -> tuple[list[int], bytes]:
        """Blocks of host memory in the order they were saved, and their names."""
        return list(self._host), b"".join(self._host.values())

    def listed(self) -> tuple[list[int], bytes]:
        """Blocks, and their names in the same order."""
        return list(self._names), b"".join(self._names.values())
