"""Staging memory: buffers for packed blocks on their way to or from another worker, beside the KV memory.

All links of a worker share one limit. Each new link gets smaller buffers once little is left, and in the end none.
"""

import torch
from torch import Tensor

from blockyard.services.kv_transfer.arena import GPU_STAGING, Arena
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.errors import ConfigError

MIN_BUFFER_BYTES = 1 << 20


def planned_bytes(config: KVTransferConfig | None) -> int:
    """Returns the bytes of its GPU that a worker has to leave for its `StagingMemory`."""
    return GPU_STAGING.limit_bytes if config is not None and config.connector == "nixl" else 0


class StagingBuffers:
    """The buffers of one link, side by side in an allocation of their own."""

    def __init__(self, arena: Arena, count: int, num_bytes: int) -> None:
        """num_bytes: of one buffer."""
        self.arena, self.num_bytes = arena, num_bytes
        self._views: list[Tensor] = list(arena.bytes.view(count, num_bytes))

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, index: int) -> Tensor:
        """[num_bytes] uint8"""
        return self._views[index]


class StagingMemory:
    """Allocates the buffers of links, and keeps those that a link has given back for the next one.

    Call its methods from one thread.
    """

    def __init__(self, kv_memory: Arena, limit_bytes: int | None = None) -> None:
        """kv_memory: of the worker, beside which the buffers are allocated. limit_bytes: of all buffers; None: the
        usual limit of such memory."""
        rules = kv_memory.staging
        self._allocate, self._keeps_free, self._usual = kv_memory.allocate_beside, rules.keeps_free, rules.buffer_bytes
        self._limit = rules.limit_bytes if limit_bytes is None else limit_bytes
        self._used = 0  # bytes of all buffers, also of those in `_free`
        self._free: list[StagingBuffers] = []

    def take(self, count: int, least_bytes: int) -> StagingBuffers:
        """Returns `count` buffers of at least this size each. They take half of what is left at most, unless that is
        less than the least size.

        Raises ConfigError if the memory is used up, or is not free.
        """
        for i, buffers in enumerate(self._free):
            if len(buffers) == count and buffers.num_bytes >= least_bytes:
                return self._free.pop(i)
        least = _whole_words(max(least_bytes, min(MIN_BUFFER_BYTES, self._usual)))
        size = max(self._usual, least)
        while size > least and 2 * count * size > self._left:
            size = max(_whole_words(size // 2), least)
        if count * size > self._left:
            self.close()
        if count * size > self._left:
            raise ConfigError(
                f"KV connector nixl: {self._used >> 20} of {self._limit >> 20} MiB of staging memory are in use, a new"
                f" link needs {count * size >> 20}"
            )
        try:
            arena = self._allocate(count * size)
        except torch.OutOfMemoryError as e:
            raise ConfigError(f"KV connector nixl: no {count * size >> 20} MiB for staging buffers are free") from e
        self._used += count * size
        return StagingBuffers(arena, count, size)

    def give_back(self, buffers: StagingBuffers) -> None:
        """Nothing reads or writes these buffers any more. Another link of a GPU gets them, because the GPU may have to
        wait for its steps to free memory."""
        if self._keeps_free:
            self._free.append(buffers)
        else:
            self.drop(buffers)

    def drop(self, buffers: StagingBuffers) -> None:
        """Frees buffers, also if another worker may still write to them: no other memory of this process gets there."""
        self._used -= len(buffers) * buffers.num_bytes
        buffers.arena.drop()

    def close(self) -> None:
        """Frees the buffers that no link has."""
        while self._free:
            self.drop(self._free.pop())

    @property
    def _left(self) -> int:
        return self._limit - self._used


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
