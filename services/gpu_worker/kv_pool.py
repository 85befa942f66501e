"""The memory that K and V live in, and attention over it."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels.paged_attention import (
    chunk_index,
    decode_attention_reference,
    gather_kv_reference,
    prefill_attention_reference,
    row_index,
    write_kv_reference,
)
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
        size = (shape.num_layers, num_blocks, 2, shape.kv_heads, block_size, shape.head_dim)
        self.memory = _zeros(size, dtype, device)
        self.layers = list(self.memory.unbind(0))

    def scrub(self, blocks: Ints) -> None:
        """Replaces what is not finite, before it reaches a later owner of these blocks."""
        index = torch.from_numpy(blocks).to(self.device)
        self.memory[:, index] = torch.nan_to_num(self.memory[:, index], posinf=0.0, neginf=0.0)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy leaves it to the kernel to hand out zeroed pages on first use: torch would touch gigabytes at start-up
    raw = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Of one block in all layers."""
    return shape.num_layers * 2 * shape.kv_heads * block_size * shape.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences of which one token is computed: the first rows of the batch, one call a layer."""

    chunks: Tensor  # flat, see chunk_index
    count: int
    length: int  # keys that are looked at of the gathered ones
    mask: Tensor | None  # [count, 1, 1, length]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several tokens of one sequence, in a row of the batch."""

    start: int
    end: int
    chunks: Tensor
    length: int
    mask: Tensor | None  # [tokens, length]


@dataclass(frozen=True, slots=True)
class Reads:
    """What layers of one window look at."""

    decodes: Decodes | None
    prefills: list[Prefill]


class PagedAttention:
    """Attention of one step, for `Step.attend`."""

    def __init__(self, pool: KVPool, rows: Tensor, reads: dict[int | None, Reads]) -> None:
        self._layers, self._rows, self._scale = pool.layers, rows, pool.shape.scale
        self._reads = [reads[window] for window in pool.shape.windows]

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        memory, reads = self._layers[layer], self._reads[layer]
        write_kv_reference(memory, self._rows, kv)
        parts: list[Tensor] = []
        if (decodes := reads.decodes) is not None:
            keys, values = gather_kv_reference(memory, decodes.chunks, decodes.count)
            keys, values = keys[:, :, : decodes.length], values[:, :, : decodes.length]
            parts.append(decode_attention_reference(q[: decodes.count], keys, values, decodes.mask, self._scale))
        for prefill in reads.prefills:
            keys, values = gather_kv_reference(memory, prefill.chunks, 1)
            keys, values = keys[:, :, : prefill.length], values[:, :, : prefill.length]
            rows = q[prefill.start : prefill.end]
            parts.append(prefill_attention_reference(rows, keys, values, prefill.mask, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ReadPlanner:
    """From block tables and lengths to what each layer reads. Integers are worked out on the host."""

    def __init__(self, pool: KVPool, dtype: torch.dtype) -> None:
        self._pool, self._dtype = pool, dtype
        self._windows = tuple(dict.fromkeys(pool.shape.windows))

    def attention(
        self, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints, num_decodes: int
    ) -> PagedAttention:
        """blocks, offsets [tokens] say where K and V go; tables [seqs, blocks], counts (new tokens) and lengths (new
        ones included) [seqs] what is read. The first `num_decodes` sequences have one new token."""
        pool = self._pool
        rows = row_index(self._tensor(blocks), self._tensor(offsets), pool.shape.kv_heads, pool.block_size)
        reads = {w: self._read(w, tables, counts, lengths, num_decodes) for w in self._windows}
        return PagedAttention(pool, rows, reads)

    def _read(self, window: int | None, tables: Ints, counts: Ints, lengths: Ints, num_decodes: int) -> Reads:
        decodes = self._decodes(window, tables[:num_decodes], lengths[:num_decodes]) if num_decodes else None
        prefills, start = [], num_decodes
        for i in range(num_decodes, len(counts)):
            count = int(counts[i])
            prefills.append(self._prefill(window, tables[i : i + 1], count, int(lengths[i]), start))
            start += count
        return Reads(decodes, prefills)

    def _decodes(self, window: int | None, tables: Ints, lengths: Ints) -> Decodes:
        size, count = self._pool.block_size, len(lengths)
        first = np.zeros(count, np.int64) if window is None else np.maximum(lengths - window, 0)  # oldest key seen
        skipped = first // size  # whole blocks that no key is read of
        end = lengths - skipped * size
        length = int(end.max())
        num = -(-length // size)
        if skipped.any():
            columns = np.minimum(skipped[:, None] + np.arange(num), tables.shape[1] - 1)
            tables = np.take_along_axis(tables, columns, axis=1)
        begin = first - skipped * size
        mask = None
        if int(end.min()) != length or begin.any():
            keys = np.arange(length)
            seen = (keys < end[:, None]) & (keys >= begin[:, None])
            mask = self._mask(seen)[:, None, None, :]
        return Decodes(self._chunks(tables[:, :num]), count, length, mask)

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
        chunks = self._chunks(table[:, skipped : skipped + -(-length // size)])
        return Prefill(start, start + count, chunks, length, mask)

    def _chunks(self, tables: Ints) -> Tensor:
        return chunk_index(self._tensor(np.ascontiguousarray(tables)), self._pool.shape.kv_heads)

    def _mask(self, seen: npt.NDArray[np.bool_]) -> Tensor:
        mask = torch.from_numpy(seen).to(self._pool.device)
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, float("-inf"))

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._pool.device, non_blocking=True)
