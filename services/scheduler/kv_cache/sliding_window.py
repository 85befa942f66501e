"""Models in which every layer sees only the last `window` tokens: sequences hold no more blocks than those.

What lies behind is released while the sequence runs. Its table keeps all places, because positions count them; those
that were released may be in use elsewhere, and no kernel reads them. A prompt needs not be found
from its beginning: what the next token sees is enough.
"""

from collections.abc import Callable, Sequence

from blockyard.services.scheduler.sequences.requests import NEVER, RunningSequence


class SlidingWindow:
    """`size` None: some layer sees all, and everything is kept."""

    def __init__(self, size: int | None, block_size: int, max_step_tokens: int) -> None:
        self.size = size
        self._block_size = block_size
        self._step = max_step_tokens

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Leading blocks that no token behind so many looks at."""
        if self.size is None:
            return 0
        return max(0, num_tokens - self.size + 1) // self._block_size

    def initial_tokens(self, known: int, num_cached_blocks: int) -> int:
        """Tokens for which a sequence takes blocks when it is seated: those it will hold at a time."""
        if self.size is None:
            return known
        return min(known, num_cached_blocks + self.size + self._step)

    def max_len(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that fits into so many blocks, computed a block at a time if need be."""
        if self.size is not None and num_blocks >= -(-self.size // self._block_size) + 2:
            return NEVER
        return num_blocks * self._block_size

    def blocks_outside(self, running: RunningSequence) -> range:
        """Places in a seat's table that it holds and that no plan in flight or to come will look at."""
        return range(
            running.num_freed_blocks, min(self.num_skipped_blocks(running.num_computed_tokens), len(running.blocks))
        )

    def longest_hit(self, hashes: Sequence[bytes], has: Callable[[bytes], bool]) -> tuple[int, int]:
        """Of a chain of blocks some of which are there: how many leading ones need not be computed, and how many of
        these need not even be there."""
        size, window = self._block_size, self.size
        assert window is not None
        best = first = run = 0  # `run`: where the blocks begin that are there without a gap
        for end, block_hash in enumerate(hashes, 1):
            if not has(block_hash):
                run = end
            elif (seen := max(0, end * size - window + 1) // size) >= run:
                best, first = end, seen
        return best, first
