"""On CPU, what a decode step gathered is kept for the next one.

While the same sequences decode, a step adds one token each to it in place of gathering all their blocks again. With
16 sequences of 200 tokens of the demo model the gathering alone was a fifth of a step.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.kv.pool import KVPool

Ints = npt.NDArray[np.int64]

ROOM = 64  # tokens that are gathered beyond the longest sequence
MOST_BYTES = 256 << 20  # above it nothing is kept: it is a second copy


class KeptKV:
    """Of one set of sequences, in their order; [seqs, 2, kv_heads, capacity, head_dim] a layer."""

    def __init__(self, owners: Ints, lengths: Ints, capacity: int, pool: KVPool) -> None:
        self.capacity = capacity
        self._owners, self._lengths = owners, lengths
        self._base = np.arange(len(owners)) * (2 * pool.shape.kv_heads * capacity)
        self._heads = np.arange(2 * pool.shape.kv_heads) * capacity
        self._layers: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self.index: Tensor | None = None  # where this step's tokens go; None while it is being filled

    def advance(self, owners: Ints, lengths: Ints) -> bool:
        """Whether it serves a step in which these sequences, each with one token more, decode."""
        fits = (
            len(owners) == len(self._owners)
            and int(lengths.max()) <= self.capacity
            and bool((owners == self._owners).all())
            and bool((lengths == self._lengths + 1).all())
        )
        if fits:
            self._lengths = lengths
            self.index = torch.from_numpy((self._base + lengths - 1)[:, None] + self._heads)
        return fits

    def fill(self, layer: int, kv: Tensor) -> None:
        """What was gathered, this step's tokens included."""
        self._layers[layer] = kv
        self._rows[layer] = kv.view(-1, kv.shape[-1])

    def add(self, layer: int, kv: Tensor) -> Tensor:
        """Adds this step's tokens, kv [seqs, 2 * kv_heads, head_dim]; returns all of them."""
        assert self.index is not None
        self._rows[layer].index_put_((self.index,), kv)
        return self._layers[layer]


def size_bytes(num_seqs: int, capacity: int, pool: KVPool) -> int:
    shape = pool.shape
    return shape.num_layers * num_seqs * 2 * shape.kv_heads * capacity * shape.head_dim * pool.dtype.itemsize
