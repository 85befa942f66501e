"""KV blocks in host memory: what the worker copies there, and back, plan by plan."""

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class BlockStore(Protocol):
    """Copies between blocks of the device's pool and blocks of host memory, in the order of the calls."""

    def save(self, blocks: list[int], hosts: list[int]) -> None:
        """Blocks of the device to blocks of the host. Whatever is computed after the call may write to `blocks`.

        Nothing that was launched before may still write to them.
        """

    def fetch(self, hosts: list[int], blocks: list[int]) -> None:
        """Blocks of the host to blocks of the device. Whatever is computed after the call finds them there.

        Nothing that was launched before may still read or write `blocks`.
        """

    def drain(self) -> None:
        """Waits for all copies."""


class PlainStore:
    """For a pool in host memory: a copy is done when the call returns."""

    def __init__(self, memory: Tensor, num_host_blocks: int) -> None:
        """memory [layers, num_blocks, ...], contiguous, of any dtype."""
        self._memory = as_bytes(memory)
        layers, _, size = self._memory.shape
        # numpy leaves it to the kernel to hand out pages on first use
        self._host = torch.from_numpy(np.empty((num_host_blocks, layers, size), np.uint8))

    def save(self, blocks: list[int], hosts: list[int]) -> None:
        with torch.inference_mode():
            self._host[hosts] = self._memory[:, blocks].transpose(0, 1)

    def fetch(self, hosts: list[int], blocks: list[int]) -> None:
        with torch.inference_mode():
            self._memory[:, blocks] = self._host[hosts].transpose(0, 1)

    def drain(self) -> None:
        """Nothing is under way."""


def as_bytes(memory: Tensor) -> Tensor:
    """[layers, num_blocks, ...] -> [layers, num_blocks, bytes of a block in a layer], the same memory.

    Raises ValueError if `memory` is not contiguous.
    """
    if not memory.is_contiguous():
        raise ValueError(f"memory must be contiguous, got strides {memory.stride()}")
    layers, num_blocks, *rest = memory.shape
    return memory.view(torch.uint8).view(layers, num_blocks, math.prod(rest) * memory.element_size())
