"""Hashes of full blocks, which a scheduler gets when it attaches."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from blockyard.shared.messages import BlockSave, FullBlock


class BlockHashes:
    """A hash is added when the plan that filled its block completes, and removed when the block is written again.

    Plans in flight may still add blocks of a slot that has failed: these are excluded until the slot ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self._is_hashed = np.zeros(num_blocks, np.bool_)
        self._hashes: dict[int, bytes] = {}
        self._excluded: dict[int, set[int]] = {}  # by slot
        self._host: dict[int, bytes] = {}  # of blocks in host memory

    def add(self, names: Iterable[FullBlock]) -> None:
        excluded: set[int] = set().union(*self._excluded.values()) if self._excluded else set()
        for entry in names:
            if 0 <= entry.block < len(self._is_hashed) and entry.block not in excluded:
                self._is_hashed[entry.block] = True
                self._hashes[entry.block] = entry.block_hash

    def invalidate(self, blocks: npt.NDArray[np.int64]) -> None:
        hit = blocks[self._is_hashed[blocks]]
        if len(hit):
            self._is_hashed[hit] = False
            for block in hit.tolist():
                self._hashes.pop(block, None)

    def clear(self) -> None:
        """Forgets all hashes, of host memory too."""
        self._is_hashed[:] = False
        self._hashes.clear()
        self._host.clear()

    def exclude(self, slot: int, blocks: list[int]) -> None:
        """The slot has failed: the contents of its blocks are unknown."""
        known = [block for block in blocks if 0 <= block < len(self._is_hashed)]
        self.invalidate(np.array(known, np.int64))
        self._excluded[slot] = set(known)

    def readmit(self, slot: int) -> None:
        self._excluded.pop(slot, None)

    def readmit_all(self) -> None:
        self._excluded.clear()

    def on_saved(self, saves: Iterable[BlockSave], good: Iterable[BlockSave]) -> None:
        """Host blocks of `saves` are overwritten; the ones in `good` have valid contents."""
        for save in saves:
            self._host.pop(save.host, None)
        self._host.update((save.host, save.block_hash) for save in good)

    def has_host_block(self, host: int) -> bool:
        return host in self._host

    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]:
        """Blocks of host memory in the order of their saves, and their hashes."""
        return list(self._host), b"".join(self._host.values())

    def blocks_and_hashes(self) -> tuple[list[int], bytes]:
        """Blocks, and their hashes in the same order."""
        return list(self._hashes), b"".join(self._hashes.values())
