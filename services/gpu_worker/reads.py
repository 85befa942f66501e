"""From block tables and lengths to what each layer writes and reads. Integers, worked out on the host."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels.paged_attention import chunk_index, row_index
from blockyard.services.gpu_worker import kept_kv
from blockyard.services.gpu_worker.attention import Decodes, PagedAttention, Prefill, Reads
from blockyard.services.gpu_worker.kept_kv import KeptKV
from blockyard.services.gpu_worker.kv_pool import KVPool

Ints = npt.NDArray[np.int64]


class ReadPlanner:
    """Builds each step's attention. Holds what decode steps may keep from one to the next."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._windows = tuple(dict.fromkeys(pool.shape.windows))
        self._kept: KeptKV | None = None

    def forget(self) -> None:
        """Owners' numbers begin anew."""
        self._kept = None

    def attention(
        self, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints, owners: Ints, num_decodes: int
    ) -> PagedAttention:
        """blocks, offsets [tokens] say where K and V go; the rest, [seqs], what is read: tables [seqs, blocks],
        counts of new tokens, lengths with them, and owners, a number that no other sequence has until `forget`.
        The first `num_decodes` sequences have one new token each."""
        pool = self._pool
        rows = row_index(blocks, offsets, pool.shape.kv_heads, pool.block_size)
        reads = {}
        for window in self._windows:
            decodes = None
            if num_decodes:
                part = (tables[:num_decodes], lengths[:num_decodes])
                decodes = self._whole(*part, owners[:num_decodes]) if window is None else self._recent(window, *part)
            reads[window] = Reads(decodes, self._prefills(window, tables, counts, lengths, num_decodes))
        return PagedAttention(pool, self._tensor(rows), reads)

    def _whole(self, tables: Ints, lengths: Ints, owners: Ints) -> Decodes:
        """Decodes that look at all their keys."""
        count, length = len(lengths), int(lengths.max())
        mask = None
        if count > 1 and int(lengths.min()) != length:
            mask = self._mask(np.arange(length) < lengths[:, None])[:, None, None, :]
        if self._kept is not None and self._kept.advance(owners, lengths):
            return Decodes(count, length, None, mask, self._kept)
        size = self._pool.block_size
        num = min(-(-(length + kept_kv.ROOM) // size), tables.shape[1])
        self._kept = None
        if self._pool.device.type == "cpu" and kept_kv.size_bytes(count, num * size, self._pool) <= kept_kv.MOST_BYTES:
            self._kept = KeptKV(owners, lengths, num * size, self._pool)
        else:
            num = -(-length // size)
        return Decodes(count, length, self._chunks(tables[:, :num]), mask, self._kept)

    def _recent(self, window: int, tables: Ints, lengths: Ints) -> Decodes:
        """Decodes that look at their last `window` keys; blocks before those are not read."""
        size = self._pool.block_size
        first = np.maximum(lengths - window, 0)
        skipped = first // size
        end, begin = lengths - skipped * size, first - skipped * size
        length = int(end.max())
        columns = np.minimum(skipped[:, None] + np.arange(-(-length // size)), tables.shape[1] - 1)
        keys = np.arange(length)
        mask = self._mask((keys < end[:, None]) & (keys >= begin[:, None]))[:, None, None, :]
        return Decodes(len(lengths), length, self._chunks(np.take_along_axis(tables, columns, axis=1)), mask, None)

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
            queries = np.arange(length - count, length)[:, None]
            keys = np.arange(length)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            mask = self._mask(seen)
        return Prefill(start, count, length, self._chunks(table[:, skipped : skipped + -(-length // size)]), mask)

    def _chunks(self, tables: Ints) -> Tensor:
        return self._tensor(chunk_index(tables, self._pool.shape.kv_heads))

    def _mask(self, seen: npt.NDArray[np.bool_]) -> Tensor:
        mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32("-inf")))
        return mask.to(self._pool.device, self._pool.dtype)

    def _tensor(self, values: Ints) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._pool.device.type == "cpu" else tensor.to(self._pool.device, non_blocking=True)
