"""From block tables and lengths to what each layer writes and reads. Integers, worked out on the host."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels.attention.torch_sdpa import chunk_index, row_index
from blockyard.services.gpu_worker.attention import gathered_kv as kept_kv
from blockyard.services.gpu_worker.attention.batch_invariant_cpu import RowByRow
from blockyard.services.gpu_worker.attention.cpu_attention import Decodes, PagedAttention, Prefill, Reads
from blockyard.services.gpu_worker.attention.gathered_kv import KeptKV
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.step import Attend

Ints = npt.NDArray[np.int64]

SPLIT_FROM = 256  # sequences up to this length are never worth a call of their own
SPLIT_RATIO = 2  # how much longer the longest of a group may be than the shortest


def by_length(lengths: Ints) -> Ints | None:
    """An order for decodes in which `length_groups` can keep padding low; None where any order will do."""
    if len(lengths) < 2 or len(lengths) * int(lengths.max()) <= SPLIT_RATIO * int(
        np.maximum(lengths, SPLIT_FROM).sum()
    ):
        return None
    return np.argsort(lengths, kind="stable")


def length_groups(lengths: Ints) -> list[tuple[int, int]]:
    """Decodes are one call, padded to the longest; where most of that were padding, one a range of lengths."""
    if by_length(lengths) is None:
        return [(0, len(lengths))]
    groups, start = [], 0
    for i, length in enumerate(lengths.tolist()):
        if length > SPLIT_RATIO * max(int(lengths[start]), SPLIT_FROM):
            groups.append((start, i))
            start = i
    return [*groups, (start, len(lengths))]


class ReadPlanner:
    """Builds each step's attention. Holds what decode steps may keep from one to the next."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        dtype = pool.dtype if pool.scales is None else torch.float32  # 8 bits are not read this way
        self._zero = torch.zeros((), dtype=dtype, device=pool.device)
        self._minus = torch.full((), float("-inf"), dtype=dtype, device=pool.device)
        self._windows = tuple(dict.fromkeys(pool.shape.windows))
        self._kept: list[KeptKV | None] = []  # of each group of decodes

    def forget(self) -> None:
        """Owners' numbers begin anew."""
        self._kept = []

    def attention(
        self, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints, owners: Ints, num_decodes: int
    ) -> Attend:
        """blocks, offsets [tokens] say where K and V go; the rest, [seqs], what is read: tables [seqs, blocks],
        counts of new tokens, lengths with them, and owners, a number that no other sequence has until `forget`.
        The first `num_decodes` sequences have one new token each."""
        pool = self._pool
        if pool.batch_invariant:
            return RowByRow(pool, blocks, offsets, tables, counts, lengths)
        rows = row_index(blocks, offsets, pool.shape.kv_heads, pool.block_size)
        reads = {}
        for window in self._windows:
            decodes: list[Decodes] = []
            if num_decodes:
                part = (tables[:num_decodes], lengths[:num_decodes])
                decodes = self._whole(*part, owners[:num_decodes]) if window is None else [self._recent(window, *part)]
            reads[window] = Reads(decodes, self._prefills(window, tables, counts, lengths, num_decodes))
        return PagedAttention(pool, self._tensor(rows), reads)

    def _whole(self, tables: Ints, lengths: Ints, owners: Ints) -> list[Decodes]:
        """Decodes that look at all their keys."""
        groups = length_groups(lengths)
        before, self._kept = self._kept, []
        decodes = []
        for i, (start, end) in enumerate(groups):
            part = slice(start, end)
            kept = before[i] if i < len(before) else None
            decodes.append(self._group(start, tables[part], lengths[part], owners[part], kept, len(groups)))
            self._kept.append(decodes[-1].kept)
        return decodes

    def _group(
        self, start: int, tables: Ints, lengths: Ints, owners: Ints, kept: KeptKV | None, num_groups: int
    ) -> Decodes:
        count, length = len(lengths), int(lengths.max())
        mask = None
        if count > 1 and int(lengths.min()) != length:
            mask = self._mask(torch.from_numpy(np.arange(length) < lengths[:, None]))[:, None, None, :]
        if kept is not None and kept.advance(owners, lengths):
            return Decodes(start, count, length, None, mask, kept)
        pool, size = self._pool, self._pool.block_size
        num = min(-(-(length + kept_kv.ROOM) // size), tables.shape[1])
        fits = num_groups * kept_kv.size_bytes(count, num * size, pool) <= kept_kv.MOST_BYTES
        if pool.device.type == "cpu" and fits:
            kept = KeptKV(owners, lengths, num * size, pool)
        else:
            kept, num = None, -(-length // size)
        return Decodes(start, count, length, self._chunks(tables[:, :num]), mask, kept)

    def _recent(self, window: int, tables: Ints, lengths: Ints) -> Decodes:
        """Decodes that look at their last `window` keys; blocks before those are not read."""
        size = self._pool.block_size
        first = np.maximum(lengths - window, 0)
        skipped = first // size
        end, begin = lengths - skipped * size, first - skipped * size
        length = int(end.max())
        columns = np.minimum(skipped[:, None] + np.arange(-(-length // size)), tables.shape[1] - 1)
        keys = np.arange(length)
        mask = self._mask(torch.from_numpy((keys < end[:, None]) & (keys >= begin[:, None])))[:, None, None, :]
        return Decodes(0, len(lengths), length, self._chunks(np.take_along_axis(tables, columns, axis=1)), mask, None)

    def _prefills(
        self, window: int | None, tables: Ints, counts: Ints, lengths: Ints, num_decodes: int
    ) -> list[Prefill]:
        prefills, start = [], num_decodes
        for i in range(num_decodes, len(counts)):
            count = int(counts[i])
            prefills.append(self._prefill(window, tables[i : i + 1], count, int(lengths[i]), start))
            start += count
        return prefills

    def _prefill(self, window: int | None, table: Ints, count: int, length: int, start: int) -> Prefill:
        size = self._pool.block_size
        oldest = 0 if window is None else max(length - count - window + 1, 0)
        skipped = oldest // size
        length -= skipped * size
        mask = None
        if count != length or (window is not None and window < length):
            queries = torch.arange(length - count, length, device=self._pool.device)[:, None]
            keys = torch.arange(length, device=self._pool.device)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            mask = self._mask(seen)
        return Prefill(start, count, length, self._chunks(table[:, skipped : skipped + -(-length // size)]), mask)

    def _chunks(self, tables: Ints) -> Tensor:
        return self._tensor(chunk_index(tables, self._pool.shape.kv_heads))

    def _mask(self, seen: Tensor) -> Tensor:
        seen = seen.to(self._pool.device, non_blocking=True)
        return torch.where(seen, self._zero, self._minus)

    def _tensor(self, values: Ints) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._pool.device.type == "cpu" else tensor.to(self._pool.device, non_blocking=True)
