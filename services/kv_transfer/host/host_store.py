"""KV blocks in host memory: the interface for copies, and the store for a pool that is in host memory too."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# of `StreamStore`, whose module imports Triton
PART_BYTES = 32 << 20  # packed blocks of one copy
NUM_PARTS = 4  # saves in flight before the next save waits
STAGING_BYTES = (NUM_PARTS + 1) * PART_BYTES  # of the device


class BlockStore(Protocol):
    """Copies between blocks of the device's pool and blocks of host memory, in the order of the calls."""

    def save(self, blocks: list[int], hosts: list[int]) -> None:
        """Copies blocks of the device to host blocks. Work launched after the call may write to `blocks`.

        No work launched before the call may still write to them.
        """

    def fetch(self, hosts: list[int], blocks: list[int]) -> None:
        """Copies host blocks to blocks of the device. Work launched after the call finds them there.

        No work launched before the call may still read or write `blocks`.
        """

    def drain(self) -> None:
        """Waits for all copies."""


class PlainStore:
    """The `BlockStore` of a pool in host memory: a copy is complete when the call returns."""

    def __init__(self, runs: Sequence[Tensor], num_host_blocks: int) -> None:
        """runs: of layers that are alike, each [layers, num_blocks, ...], contiguous, of any dtype."""
        self._runs: list[tuple[Tensor, Tensor]] = []  # [layers, num_blocks, bytes], and [host blocks, layers, bytes]
        for memory in map(as_bytes, runs):
            layers, _, size = memory.shape
            # from numpy: the kernel allocates its pages on first use
            self._runs.append((memory, torch.from_numpy(np.empty((num_host_blocks, layers, size), np.uint8))))

    def save(self, blocks: list[int], hosts: list[int]) -> None:
        with torch.inference_mode():
            for memory, host in self._runs:
                host[hosts] = memory[:, blocks].transpose(0, 1)

    def fetch(self, hosts: list[int], blocks: list[int]) -> None:
        with torch.inference_mode():
            for memory, host in self._runs:
                memory[:, blocks] = host[hosts].transpose(0, 1)

    def drain(self) -> None:
        """Copies are already complete."""


class JoinedStore:
    """The `BlockStore` of layers that differ in what they keep: a store for each run of layers that are alike."""

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        self._stores = stores

    def save(self, blocks: list[int], hosts: list[int]) -> None:
        for store in self._stores:
            store.save(blocks, hosts)

    def fetch(self, hosts: list[int], blocks: list[int]) -> None:
        for store in self._stores:
            store.fetch(hosts, blocks)

    def drain(self) -> None:
        for store in self._stores:
            store.drain()


def as_bytes(memory: Tensor) -> Tensor:
    """[layers, num_blocks, ...] -> [layers, num_blocks, bytes of a block in a layer], the same memory.

    Raises ValueError if `memory` is not contiguous.
    """
    if not memory.is_contiguous():
        raise ValueError(f"memory must be contiguous, got strides {memory.stride()}")
    layers, num_blocks, *rest = memory.shape
    return memory.view(torch.uint8).view(layers, num_blocks, math.prod(rest) * memory.element_size())
