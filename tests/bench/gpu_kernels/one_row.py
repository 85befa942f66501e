"""What the benchmarks of one row's decode attention share: its sequence, random weights, and the products around it.

The products run before and after attention as in a decode step, because with PDL a kernel begins while the one before
it ends. The time of the products alone is subtracted.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.layers.linear_skinny import linear_skinny
from blockyard.services.gpu_worker.bench.timing import CACHE_BYTES, graph_seconds

BLOCK_SIZE = 16
LONGEST = 8192  # as the graphs of decode steps are captured for
KEYS = (200, 1000, 2000, 4000)
DEVICE = torch.device("cuda")

HEADER = "| heads | keys | fused, us | kernels of their own, us |\n|---|---|---|---|"


def random_weights(*size: int) -> Tensor:
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16)


def random_rotation(dim: int) -> Tensor:
    """[1, 1, dim / 2] complex64."""
    angles = torch.rand(1, 1, dim // 2, device=DEVICE) * 6
    return torch.polar(torch.ones_like(angles), angles)


def num_blocks(keys: int) -> int:
    return -(-keys // BLOCK_SIZE)


def one_sequence(keys: int) -> PagedKVMetadata:
    """A sequence whose blocks are in random order, at its last key."""
    tables = torch.zeros(1, LONGEST // BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    tables[0, : num_blocks(keys)] = torch.randperm(num_blocks(keys), device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return PagedKVMetadata(slots, slots + keys - 1, tables)


def num_layers(weights: int) -> int:
    """How many layers of so many weights the L2 cache does not hold."""
    return max(CACHE_BYTES // (2 * weights), 1) + 1


def product(x: Tensor, weight: Tensor) -> Tensor:
    return linear_skinny(x, weight, None, out_tile=8, tile=512, warps=4, early=2, pdl=True)


def layer_us(run: Callable[[], object], layers: int) -> float:
    """Microseconds a layer of a graph of `run`, which computes so many."""
    return 1e6 * graph_seconds([run]) / layers
