"""The block table of one running sequence: its KV blocks in the order of its tokens."""

from collections.abc import Collection

NEVER = 1 << 62  # more tokens than any sequence has


class BlockTable:
    """Written by the `KVCacheManager`; the plan builder reads it.

    Entries stay when their block is given up outside the sliding window, because positions count them.
    """

    def __init__(
        self, block_size: int, blocks: list[int], num_cached: int, num_freed: int, copied_from: int | None
    ) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.capacity = len(blocks) * block_size  # tokens
        self.num_cached = num_cached  # leading blocks that were found: other sequences may have them too
        self.num_freed = num_freed  # leading entries with blocks that are not held: they are outside the sliding window
        self.copied_from = copied_from  # this block was copied into the first block that was not found
        self.num_hashed = num_cached  # leading blocks that are hashed, or will be once a plan is sent
        self.next_hash_at = NEVER  # computed tokens with which the next block is full and to be hashed
        self.is_hash_due = False  # waits in the manager's queue for its next block to be hashed

    def extend(self, blocks: list[int]) -> None:
        self.blocks += blocks
        self.capacity += len(blocks) * self.block_size

    def free_first(self, end: int) -> list[int]:
        """The blocks before entry `end` that are still held; from now on they are not."""
        first, self.num_freed = self.num_freed, end
        return self.blocks[first:end]

    def set_hashed(self, num_blocks: int) -> None:
        self.num_hashed = num_blocks
        self.next_hash_at = (num_blocks + 1) * self.block_size

    def stop_hashing(self) -> None:
        self.next_hash_at = NEVER

    def invalidate(self) -> None:
        """The contents are wrong: no block is hashed any more."""
        self.num_hashed, self.next_hash_at = 0, NEVER

    def set_hash_due(self) -> bool:
        """False if it was due already."""
        was_due, self.is_hash_due = self.is_hash_due, True
        return not was_due

    def clear_hash_due(self) -> None:
        self.is_hash_due = False

    def reads_any(self, bad: Collection[int]) -> bool:
        """Whether blocks that this sequence found, or copied from, are among `bad`."""
        return self.copied_from in bad or any(block in bad for block in self.blocks[: self.num_cached])
