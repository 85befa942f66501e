"""Attention of one step on the CPU: gathers K and V from the paged cache and multiplies with torch."""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.attention.torch_sdpa import (
    decode_attention_reference,
    gather_kv_reference,
    prefill_attention_reference,
    write_kv_reference,
)
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.absorbed import ChosenRows, attend_absorbed
from blockyard.services.gpu_worker.kv.pool import KVPool, block_bytes
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices

Positions = TypeVar("Positions", int, Ints, Tensor)

EXTRA_TOKENS = 64  # capacity beyond the longest sequence, for the next decode steps
MAX_BYTES = 256 << 20  # limit of gathered K and V, a second copy; above it, each step gathers again


class GatheredKV:
    """The gathered K and V of decode sequences, reused by the next step.

    Each layer has a tensor [seqs, planes, kv_heads, capacity, head_dim]. All layers have as many planes and heads.
    While the same sequences decode, each step adds one token of each sequence instead of gathering all blocks again.
    With 16 sequences of 200 tokens of the demo model, gathering alone took a fifth of a step.
    """

    def __init__(self, owners: Ints, lengths: Ints, capacity: int, kept_heads: int) -> None:
        """kept_heads: planes times heads."""
        self.capacity = capacity
        self._owners, self._lengths = owners, lengths
        self._base = np.arange(len(owners)) * (kept_heads * capacity)
        self._heads = np.arange(kept_heads) * capacity
        self._layers: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self._index: Tensor | None = None  # rows of the new tokens; None in the step that gathers

    def advance(self, owners: Ints, lengths: Ints) -> bool:
        """Moves on by one token for each sequence. False if it does not fit: other sequences, or no capacity left."""
        fits = (
            len(owners) == len(self._owners)
            and int(lengths.max()) <= self.capacity
            and bool((owners == self._owners).all())
            and bool((lengths == self._lengths + 1).all())
        )
        if fits:
            self._lengths = lengths
            self._index = torch.from_numpy((self._base + lengths - 1)[:, None] + self._heads)
        return fits

    def fill(self, layer: int, kv: Tensor) -> None:
        """Stores the gathered K and V of a layer, which include the tokens of this step."""
        self._layers[layer] = kv
        self._rows[layer] = kv.view(-1, kv.shape[-1])

    def add(self, layer: int, kv: Tensor) -> Tensor:
        """Adds the tokens of this step, kv [seqs, planes * kv_heads, head_dim]. Returns K and V of all tokens."""
        assert self._index is not None
        self._rows[layer].index_put_((self._index,), kv)
        return self._layers[layer]


def gathered_bytes(num_seqs: int, capacity: int, pool: KVPool) -> int:
    """An upper bound of the size of `GatheredKV` of all layers."""
    return num_seqs * capacity * block_bytes(pool.shape, 1, pool.dtype)


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decode sequences in a range of rows, computed in one call for each layer."""

    start: int
    count: int
    length: int  # number of keys that are read, padding included
    chunks: Tensor | None  # flat, see chunk_index; None if `gathered` has the keys
    mask: Tensor | None  # [count, 1, 1, length]
    gathered: GatheredKV | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """New tokens of one prefill sequence, in a range of rows."""

    start: int
    count: int
    length: int
    chunks: Tensor
    mask: Tensor | None  # [count, length]


@dataclass(frozen=True, slots=True)
class KindMetadata:
    """The attention metadata of a step for all layers of one `LayerKind`."""

    rows: Tensor  # the cache rows that K and V of each token are written to
    decodes: list[Decodes]  # before the rows of prefills
    prefills: list[Prefill]


class LayerKind(NamedTuple):
    """Layers with equal attention metadata."""

    window: int | None
    chunked: bool  # see `ScoreRules`
    kept_heads: int  # of K and of V together

    @staticmethod
    def of(shape: AttentionShape) -> "LayerKind":
        planes, heads, _ = shape.kept
        return LayerKind(shape.rules.window, shape.rules.chunked, planes * heads)

    def oldest_keys(self, positions: Positions) -> Positions:
        """The first key that each of these positions attends to; negative or 0: all, as where there is no window."""
        if self.window is None:
            return positions - positions
        return positions - positions % self.window if self.chunked else positions - self.window + 1


class CpuAttention:
    """The attention of one step. Implements `step.Attend`."""

    def __init__(self, pool: KVPool, metadata: dict[LayerKind, KindMetadata]) -> None:
        self._pool, self._shapes = pool, pool.shape.attention
        self._metadata = [metadata[LayerKind.of(shape)] for shape in self._shapes]

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        return attend_absorbed(self, layer, query, rotation, latent)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return ChosenRows(self, indices.rows)

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        shape = self._shapes[layer]
        heads, rotated = shape.num_heads, shape.num_heads + shape.kv_heads
        normed, kv = qkv, qkv[:, heads:]
        if norm is not None:
            normed = norm(qkv[:, : len(norm.weight)])
        if rotation is not None:
            apply_rope_reference(normed[:, :rotated], rotation)
        if norm is not None:
            qkv[:, heads : len(norm.weight)] = normed[:, heads:]
        q = normed[:, :heads]
        metadata = self._metadata[layer]
        write_kv_reference(self._pool.rows[layer], metadata.rows, kv)
        if len(metadata.decodes) == 1 and not metadata.prefills:
            return self._decode(layer, metadata.decodes[0], q, kv)
        parts = []
        for decodes in metadata.decodes:
            part = slice(decodes.start, decodes.start + decodes.count)
            parts.append(self._decode(layer, decodes, q[part], kv[part]))
        for prefill in metadata.prefills:
            known = self._gather(layer, prefill.chunks, 1)[:, :, :, : prefill.length]
            rows = q[prefill.start : prefill.start + prefill.count]
            parts.append(prefill_attention_reference(rows, known, prefill.mask, shape.rules, shape.latent_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, decodes: Decodes, q: Tensor, kv: Tensor) -> Tensor:
        gathered = decodes.gathered
        if decodes.chunks is not None:
            known = self._gather(layer, decodes.chunks, decodes.count)
            if gathered is not None:
                gathered.fill(layer, known)
        else:
            assert gathered is not None
            known = gathered.add(layer, kv)
        known = known.narrow(3, 0, decodes.length)
        shape = self._shapes[layer]
        return decode_attention_reference(q, known, decodes.mask, shape.rules, shape.latent_dim)

    def _gather(self, layer: int, chunks: Tensor, num_seqs: int) -> Tensor:
        planes, heads, size = self._shapes[layer].kept
        return gather_kv_reference(self._pool.chunks[layer], chunks, num_seqs, heads, size, planes)
