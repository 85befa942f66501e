"""Global and shared memory of a launch."""

from collections.abc import Sequence

import numpy as np
import torch

Bits = np.ndarray  # uint64 [threads], or bool of predicates
BASE = 1 << 40  # the addresses of tensor i begin at (i + 1) * BASE


class Memory:
    """Global memory: the tensors of a launch, which stores change."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.bases = [(i + 1) * BASE for i in range(len(tensors))]
        self._bytes = [
            one.view(torch.uint8).numpy().reshape(-1) if one.numel() else np.zeros(0, np.uint8)
            for one in (one.reshape(-1) for one in tensors)
        ]

    def _place(self, address: int, size: int) -> tuple[np.ndarray, int]:
        which, offset = address // BASE - 1, address % BASE
        assert 0 <= which < len(self._bytes) and offset + size <= len(self._bytes[which]), (which, offset, size)
        assert offset % size == 0, "not aligned"
        return self._bytes[which], offset

    def load(self, addresses: Bits, size: int, wanted: Bits) -> np.ndarray:
        """uint8 [threads, size]."""
        found = np.zeros((len(addresses), size), np.uint8)
        for i in np.flatnonzero(wanted):
            memory, offset = self._place(int(addresses[i]), size)
            found[i] = memory[offset : offset + size]
        return found

    def store(self, addresses: Bits, values: np.ndarray, wanted: Bits) -> None:
        for i in np.flatnonzero(wanted):
            memory, offset = self._place(int(addresses[i]), values.shape[1])
            memory[offset : offset + values.shape[1]] = values[i]

    def add(self, addresses: Bits, values: Bits, wanted: Bits) -> Bits:
        """Adds whole numbers of 32 bits, one after the other, and returns what was there."""
        before = np.zeros(len(addresses), np.uint64)
        for i in np.flatnonzero(wanted):
            memory, offset = self._place(int(addresses[i]), 4)
            number = memory[offset : offset + 4].view(np.uint32)
            before[i] = number[0]
            number[0] += np.uint32(values[i])
        return before


class Shared:
    """Shared memory of a program, with the same methods."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint8)

    def load(self, addresses: Bits, size: int, wanted: Bits) -> np.ndarray:
        place = addresses.astype(np.int64)[:, None] + np.arange(size)
        return np.where(wanted[:, None], self._bytes[np.where(wanted[:, None], place, 0)], 0).astype(np.uint8)

    def store(self, addresses: Bits, values: np.ndarray, wanted: Bits) -> None:
        place = addresses.astype(np.int64)[:, None] + np.arange(values.shape[1])
        self._bytes[place[wanted]] = values[wanted]

    def add(self, addresses: Bits, values: Bits, wanted: Bits) -> None:
        """Of whole numbers of 32 bits."""
        np.add.at(
            self._bytes.view(np.uint32), addresses[wanted].astype(np.int64) // 4, values[wanted].astype(np.uint32)
        )
