"""Builds the attention metadata of a step on the CPU from block tables and lengths."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.attention.torch_sdpa import chunk_index, row_index
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention import cpu_attention
from blockyard.services.gpu_worker.attention.batch_invariant_cpu import BatchInvariantCpuAttention
from blockyard.services.gpu_worker.attention.choice import AttentionCase, AttentionKernel, RowKind, choose
from blockyard.services.gpu_worker.attention.cpu_attention import (
    CpuAttention,
    Decodes,
    GatheredKV,
    KindMetadata,
    LayerKind,
    Prefill,
)
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.step import Attend

SPLIT_FROM = 256  # sequences up to this length share one call
SPLIT_RATIO = 2  # the longest sequence of a group is at most this many times the shortest


def length_order(lengths: Ints) -> Ints | None:
    """Returns an order of decodes for which `length_groups` pads little; None if every order pads little."""
    if len(lengths) < 2 or len(lengths) * int(lengths.max()) <= SPLIT_RATIO * int(
        np.maximum(lengths, SPLIT_FROM).sum()
    ):
        return None
    return np.argsort(lengths, kind="stable")


def length_groups(lengths: Ints) -> list[tuple[int, int]]:
    """Splits decodes into ranges that share a call and are padded to the longest. One range if that pads little."""
    if length_order(lengths) is None:
        return [(0, len(lengths))]
    groups, start = [], 0
    for i, length in enumerate(lengths.tolist()):
        if length > SPLIT_RATIO * max(int(lengths[start]), SPLIT_FROM):
            groups.append((start, i))
            start = i
    return [*groups, (start, len(lengths))]


class MetadataBuilder(Protocol):
    """The methods of `CpuMetadataBuilder`."""

    def clear(self) -> None: ...

    def attention(
        self, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints, owners: Ints, num_decodes: int
    ) -> Attend: ...


@dataclass(frozen=True, slots=True, eq=False)
class GatheredGroups:
    """The gathered K and V of the last step of a decode batch."""

    owners: Ints
    groups: list[GatheredKV | None]  # one for each group of decodes

    def is_of(self, owners: Ints) -> bool:
        """Whether a step has sequences of this batch."""
        return bool(np.isin(owners, self.owners).any())


class CpuMetadataBuilder:
    """Builds the attention of each step. Keeps the gathered K and V of decodes for the next step."""

    def __init__(self, pool: KVPool, num_batches: int = 1) -> None:
        """num_batches: decode batches that run in turn."""
        self._pool, self._num_batches = pool, num_batches
        dtype = pool.dtype if pool.scales is None else torch.float32  # an 8-bit KV cache exists only on GPUs
        self._zero = torch.zeros((), dtype=dtype, device=pool.device)
        self._minus_inf = torch.full((), float("-inf"), dtype=dtype, device=pool.device)
        self._kinds = tuple(dict.fromkeys(map(LayerKind.of, pool.shape.attention)))
        self._gathered: dict[LayerKind, list[GatheredGroups]] = {}  # of each batch, the last one first

    def clear(self) -> None:
        """Drops the gathered K and V, because owner numbers may be reused."""
        self._gathered = {}

    def attention(
        self, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints, owners: Ints, num_decodes: int
    ) -> Attend:
        """Builds the attention of one step. The first `num_decodes` sequences have one new token each.

        blocks, offsets [tokens]: the places that K and V are written to. tables [seqs, blocks]. counts [seqs]: new
        tokens. lengths [seqs]: all tokens, the new ones included. owners [seqs]: numbers, unique until `clear`.
        """
        pool = self._pool
        case = AttentionCase(
            device="cpu",
            kind=RowKind.DECODE if num_decodes else RowKind.PREFILL,
            kv_dtype=pool.dtype,
            batch_invariant=pool.batch_invariant,
            layer=pool.shape.attention[0],
        )
        if choose(case) is AttentionKernel.TORCH_BATCH_INVARIANT:
            return BatchInvariantCpuAttention(pool, blocks, offsets, tables, counts, lengths)
        rows = {
            heads: self._tensor(row_index(blocks, offsets, heads, pool.block_size))
            for heads in {kind.kept_heads for kind in self._kinds}
        }
        metadata = {}
        for kind in self._kinds:
            decodes: list[Decodes] = []
            if num_decodes:
                part = (tables[:num_decodes], lengths[:num_decodes])
                if kind.window is None:
                    decodes = self._full_decodes(kind, *part, owners[:num_decodes])
                else:
                    decodes = [self._windowed_decodes(kind, *part)]
            prefills = self._prefills(kind, tables, counts, lengths, num_decodes)
            metadata[kind] = KindMetadata(rows[kind.kept_heads], decodes, prefills)
        return CpuAttention(pool, metadata)

    def _full_decodes(self, kind: LayerKind, tables: Ints, lengths: Ints, owners: Ints) -> list[Decodes]:
        """Builds the decodes of layers without a window."""
        groups = length_groups(lengths)
        kept = self._gathered.setdefault(kind, [])
        own = next((one for one in kept if one.is_of(owners)), None) if self._num_batches > 1 else None
        if own is None and len(kept) == self._num_batches:
            own = kept[-1]
        if own is not None:
            kept.remove(own)
        before = [] if own is None else own.groups
        now: list[GatheredKV | None] = []
        kept.insert(0, GatheredGroups(owners, now))
        decodes = []
        for i, (start, end) in enumerate(groups):
            part = slice(start, end)
            gathered = before[i] if i < len(before) else None
            decodes.append(self._group(kind, start, tables[part], lengths[part], owners[part], gathered, len(groups)))
            now.append(decodes[-1].gathered)
        return decodes

    def _group(
        self, kind: LayerKind, start: int, tables: Ints, lengths: Ints, owners: Ints, gathered: GatheredKV | None,
        num_groups: int,
    ) -> Decodes:  # fmt: skip
        count, length = len(lengths), int(lengths.max())
        mask = None
        if count > 1 and int(lengths.min()) != length:
            mask = self._mask(torch.from_numpy(np.arange(length) < lengths[:, None]))[:, None, None, :]
        if gathered is not None and gathered.advance(owners, lengths):
            return Decodes(start, count, length, None, mask, gathered)
        pool, size = self._pool, self._pool.block_size
        num = min(-(-(length + cpu_attention.EXTRA_TOKENS) // size), tables.shape[1])
        fits = num_groups * cpu_attention.gathered_bytes(count, num * size, pool) <= cpu_attention.MAX_BYTES
        if fits:
            gathered = GatheredKV(owners, lengths, num * size, kind.kept_heads)
        else:
            gathered, num = None, -(-length // size)
        return Decodes(start, count, length, self._chunks(kind, tables[:, :num]), mask, gathered)

    def _windowed_decodes(self, kind: LayerKind, tables: Ints, lengths: Ints) -> Decodes:
        """Builds the decodes of layers with a window. Blocks before the window are not read."""
        size = self._pool.block_size
        first = np.maximum(kind.oldest_keys(lengths - 1), 0)
        skipped = first // size
        end, begin = lengths - skipped * size, first - skipped * size
        length = int(end.max())
        columns = np.minimum(skipped[:, None] + np.arange(-(-length // size)), tables.shape[1] - 1)
        keys = np.arange(length)
        mask = self._mask(torch.from_numpy((keys < end[:, None]) & (keys >= begin[:, None])))[:, None, None, :]
        chunks = self._chunks(kind, np.take_along_axis(tables, columns, axis=1))
        return Decodes(0, len(lengths), length, chunks, mask, None)

    def _prefills(self, kind: LayerKind, tables: Ints, counts: Ints, lengths: Ints, num_decodes: int) -> list[Prefill]:
        prefills, start = [], num_decodes
        for i in range(num_decodes, len(counts)):
            count = int(counts[i])
            prefills.append(self._prefill(kind, tables[i : i + 1], count, int(lengths[i]), start))
            start += count
        return prefills

    def _prefill(self, kind: LayerKind, table: Ints, count: int, length: int, start: int) -> Prefill:
        size, window = self._pool.block_size, kind.window
        skipped = max(kind.oldest_keys(length - count), 0) // size
        passed = skipped * size
        length -= passed
        mask = None
        if count != length or (window is not None and window < length):
            queries = torch.arange(length - count, length, device=self._pool.device)[:, None]
            keys = torch.arange(length, device=self._pool.device)
            seen = keys <= queries
            if window is not None:
                seen &= keys >= kind.oldest_keys(queries + passed) - passed
            mask = self._mask(seen)
        return Prefill(start, count, length, self._chunks(kind, table[:, skipped : skipped + -(-length // size)]), mask)

    def _chunks(self, kind: LayerKind, tables: Ints) -> Tensor:
        return self._tensor(chunk_index(tables, kind.kept_heads))

    def _mask(self, seen: Tensor) -> Tensor:
        seen = seen.to(self._pool.device, non_blocking=True)
        return torch.where(seen, self._zero, self._minus_inf)

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values)
