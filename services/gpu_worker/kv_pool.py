"""The memory that K and V live in."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.models.decoder import ModelShape

Ints = npt.NDArray[np.int64]


class KVPool:
    """One pool of blocks for all layers, [layers, num_blocks, 2, kv_heads, block_size, head_dim].

    Starts at zero and is kept finite: what lies behind a sequence's end is read and multiplied by 0.
    """

    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.num_blocks, self.block_size, self.device = shape, num_blocks, block_size, device
        self.dtype = dtype
        size = (shape.num_layers, num_blocks, 2, shape.kv_heads, block_size, shape.head_dim)
        self.memory = _zeros(size, dtype, device)
        layers = self.memory.unbind(0)
        self.rows = [layer.view(-1, shape.head_dim) for layer in layers]  # as writes see a layer
        self.chunks = [layer.view(-1, block_size * shape.head_dim) for layer in layers]  # as reads see it

    @torch.inference_mode()
    def scrub(self, blocks: Ints) -> None:
        """Replaces what is not finite, before it reaches a later owner of these blocks."""
        index = torch.from_numpy(blocks).to(self.device)
        self.memory[:, index] = torch.nan_to_num(self.memory[:, index], posinf=0.0, neginf=0.0)


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Of one block in all layers."""
    return shape.num_layers * 2 * shape.kv_heads * block_size * shape.head_dim * dtype.itemsize


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy leaves it to the kernel to hand out zeroed pages on first use: torch would touch gigabytes at start-up
    raw = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)
