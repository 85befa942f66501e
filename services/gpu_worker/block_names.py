"""Which blocks are full under which name: what a scheduler that attaches gets to know."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from blockyard.shared.messages import BlockName


class BlockNames:
    """A name is learnt when the plan that filled its block has completed, and lost when the block is written again."""

    def __init__(self, num_blocks: int) -> None:
        self._named = np.zeros(num_blocks, np.bool_)
        self._names: dict[int, bytes] = {}

    def learn(self, names: Iterable[BlockName]) -> None:
        for entry in names:
            if 0 <= entry.block < len(self._named):
                self._named[entry.block] = True
                self._names[entry.block] = entry.name

    def forget(self, blocks: npt.NDArray[np.int64]) -> None:
        hit = blocks[self._named[blocks]]
        if len(hit):
            self._named[hit] = False
            for block in hit.tolist():
                self._names.pop(block, None)

    def listed(self) -> tuple[list[int], bytes]:
        """Blocks, and their names in the same order."""
        return list(self._names), b"".join(self._names.values())
