"""KV blocks of one worker group, counted in integers."""

from blockyard.services.scheduler.id_pool import Horizon, IdPool


class BlockPool(IdPool):
    """Whoever holds blocks keeps their table; the pool knows only what is free and what rests."""

    def __init__(self, num_blocks: int, block_size: int, horizon: Horizon) -> None:
        super().__init__(num_blocks, horizon)
        self.block_size = block_size  # tokens
        self._watermark = max(1, num_blocks // 100)

    @property
    def num_tokens(self) -> int:
        return self.num_ids * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admits(self, num_blocks: int, alone: bool) -> bool:
        """Whether a newcomer may take so many. Beside others it leaves a little, or it is the next to be preempted."""
        return num_blocks + (0 if alone else self._watermark) <= self.num_free
