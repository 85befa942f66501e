"""Models in which every layer sees only the last `window` tokens: a sequence holds only the blocks of its window.

Blocks outside the window are given up while the sequence runs. Their entries in the block table stay, because positions
count them, and no kernel reads them. A cached prefix can be used when the blocks of its last window are cached.
"""

from collections.abc import Callable, Sequence

from blockyard.services.scheduler.sequences.requests import NEVER


def max_len(window: int | None, block_size: int, num_blocks: int) -> int:
    """Tokens of the longest sequence that fits into `num_blocks` blocks, if need be computed block by block.

    `window`: in tokens; None if some layer sees all tokens, so that every block is kept.
    """
    if window is not None and num_blocks >= -(-window // block_size) + 2:
        return NEVER
    return num_blocks * block_size


class SlidingWindow:
    """The window of a model in which no layer sees more than `size` tokens."""

    def __init__(self, size: int, block_size: int, max_step_tokens: int) -> None:
        self.size = size
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Leading blocks that no token after the first `num_tokens` sees."""
        return max(0, num_tokens - self.size + 1) // self._block_size

    def initial_tokens(self, num_tokens: int, num_found: int) -> int:
        """Tokens for which a sequence takes blocks when it starts behind `num_found` cached tokens."""
        return min(num_tokens, num_found + self.size + self._max_step_tokens)

    def longest_hit(self, hashes: Sequence[bytes], is_cached: Callable[[bytes], bool]) -> tuple[int, int]:
        """The longest usable prefix in blocks, and how many of its leading blocks are outside the window."""
        size, window = self._block_size, self.size
        best = first = gap_end = 0  # all blocks from `gap_end` on are cached
        for end, block_hash in enumerate(hashes, 1):
            if not is_cached(block_hash):
                gap_end = end
            elif (skipped := max(0, end * size - window + 1) // size) >= gap_end:
                best, first = end, skipped
        return best, first
