"""Reduces the hidden states of a sequence to one row, or keeps the requested ones, over all its steps.

All is on the device and in float32. A step reduces the rows that it has computed; of a sequence that is not complete
the result is kept by its slot, and the next step's is combined with it. Nearly all sequences are complete in one step.
"""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.pooling.chunks import PooledChunk
from blockyard.shared.config.pooling.modes import PoolingMode


class RowsNeeded(enum.Enum):
    """The rows of a step that a pooler reads the hidden states of."""

    LAST = "last"  # of each sequence: the layers may drop the others
    ALL = "all"


class PooledRows(NamedTuple):
    """Rows of the sequences of a chunk that are complete, one behind the other."""

    rows: Tensor  # [any, hidden] float32
    counts: Ints | None = None  # rows of each sequence; None: each has one


class Pooler(Protocol):
    """One way to pool. It keeps what it has of sequences that are not complete."""

    rows: RowsNeeded

    def add(self, chunk: PooledChunk) -> PooledRows:
        """Adds the rows of a step. Returns those of each sequence that is complete: one row, or of a mode for tokens as
        many as it keeps."""

    def drop(self, slot: int) -> None:
        """Drops the state of a sequence that ended or starts over."""


class SumPooler:
    """Sums, which are divided by the number of tokens, by its root, or by the sum of the positions."""

    rows = RowsNeeded.ALL

    def __init__(self, mode: PoolingMode) -> None:
        self._mode = mode
        self._kept: dict[int, Tensor] = {}

    def add(self, chunk: PooledChunk) -> PooledRows:
        """Implements `Pooler`."""
        rows = chunk.hidden[: int(chunk.counts.sum())].float()
        if (weights := self._weights(chunk)) is not None:
            rows = rows * chunk.on_device(weights)[:, None]
        sums = torch.segment_reduce(rows, "sum", lengths=chunk.on_device(chunk.counts), axis=0, unsafe=True)
        sums, places = _complete(sums, chunk, self._kept, torch.add)
        divisors = self._divisors(chunk.totals[places], chunk.skips[places])
        return PooledRows(sums / chunk.on_device(divisors)[:, None])

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)

    def _weights(self, chunk: PooledChunk) -> "np.ndarray[tuple[int], np.dtype[np.float32]] | None":
        """The weight of each row; None: all have 1."""
        is_weighted = self._mode is PoolingMode.WEIGHTED_MEAN
        if not is_weighted and not chunk.skips.any():
            return None
        positions = chunk.positions
        is_pooled = positions >= np.repeat(chunk.skips, chunk.counts)
        return np.where(is_pooled, positions + 1 if is_weighted else 1, 0).astype(np.float32)

    def _divisors(self, totals: Ints, skips: Ints) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        pooled = np.maximum(totals - skips, 0).astype(np.float64)
        match self._mode:
            case PoolingMode.MEAN_SQRT_LEN:
                pooled = np.sqrt(pooled)
            case PoolingMode.WEIGHTED_MEAN:
                pooled = (totals * (totals + 1) - skips * (skips + 1)) / 2
        divisors: np.ndarray[tuple[int], np.dtype[np.float32]] = np.maximum(pooled, 1e-9).astype(np.float32)
        return divisors


class MaxPooler:
    """The largest of each number."""

    rows = RowsNeeded.ALL

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def add(self, chunk: PooledChunk) -> PooledRows:
        """Implements `Pooler`."""
        rows = chunk.hidden[: int(chunk.counts.sum())].float()
        if chunk.skips.any():
            mask = chunk.on_device(chunk.positions < np.repeat(chunk.skips, chunk.counts))
            rows = rows.masked_fill(mask[:, None], float("-inf"))
        most = torch.segment_reduce(rows, "max", lengths=chunk.on_device(chunk.counts), axis=0, unsafe=True)
        return PooledRows(_complete(most, chunk, self._kept, torch.maximum)[0])

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)


class FirstPooler:
    """The first token's row, behind skipped ones. A sequence without any other has its first token's."""

    rows = RowsNeeded.ALL

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def add(self, chunk: PooledChunk) -> PooledRows:
        """Implements `Pooler`."""
        wanted = np.where(chunk.skips < chunk.totals, chunk.skips, 0) - chunk.firsts
        inside = np.clip(wanted, 0, chunk.counts - 1)
        rows = chunk.hidden.index_select(0, chunk.on_device(chunk.starts + inside)).float()
        if chunk.is_whole:
            return PooledRows(rows)
        found = [rows[:0]]
        for i, one in enumerate(chunk.sequences()):
            row = rows[i] if inside[i] == wanted[i] else self._kept.pop(one.slot, None)
            if one.is_complete:
                assert row is not None, "an earlier step had the row"
                found.append(row[None])
            elif row is not None:
                self._kept[one.slot] = row.clone()
        return PooledRows(torch.cat(found))

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)


class LastPooler:
    """The last token's row."""

    rows = RowsNeeded.LAST

    def add(self, chunk: PooledChunk) -> PooledRows:
        """Implements `Pooler`."""
        last = (chunk.starts + chunk.counts - 1)[chunk.complete]
        return PooledRows(chunk.hidden.index_select(0, chunk.on_device(last)).float())

    def drop(self, slot: int) -> None:
        pass


class TokenPooler:
    """The rows of all tokens, or of the ones that end a step."""

    rows = RowsNeeded.ALL

    def __init__(self, step_tag_id: int | None = None) -> None:
        """step_tag_id: the token that ends a step; None: all tokens are kept."""
        self._step_tag_id = step_tag_id
        self._kept: dict[int, list[Tensor]] = {}

    def add(self, chunk: PooledChunk) -> PooledRows:
        """Implements `Pooler`."""
        num_rows = int(chunk.counts.sum())
        wanted = chunk.positions >= np.repeat(chunk.skips, chunk.counts)
        if self._step_tag_id is not None:
            wanted &= chunk.token_ids[:num_rows] == self._step_tag_id
        kept = chunk.hidden[:num_rows]
        if not wanted.all():
            kept = kept.index_select(0, chunk.on_device(np.flatnonzero(wanted)))
        owners = np.repeat(np.arange(len(chunk.counts)), chunk.counts)
        counts = np.bincount(owners[wanted], minlength=len(chunk.counts))
        if chunk.is_whole:
            return PooledRows(kept.float(), counts)
        found = [kept[:0].float()]
        lengths: list[int] = []
        for one, rows in zip(chunk.sequences(), torch.split(kept.float(), counts.tolist()), strict=True):
            parts = [*self._kept.pop(one.slot, []), rows]
            if one.is_complete:
                found += parts
                lengths.append(sum(map(len, parts)))
            else:
                self._kept[one.slot] = [part.clone() for part in parts]
        return PooledRows(torch.cat(found), np.array(lengths, np.int64))

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)


def make_pooler(mode: PoolingMode, step_tag_id: int | None = None) -> Pooler:
    match mode:
        case PoolingMode.CLS:
            return FirstPooler()
        case PoolingMode.LAST:
            return LastPooler()
        case PoolingMode.MAX:
            return MaxPooler()
        case PoolingMode.ALL:
            return TokenPooler()
        case PoolingMode.STEP:
            return TokenPooler(step_tag_id)
        case _:
            return SumPooler(mode)


class JoinedPooler:
    """The rows of several poolers side by side. Implements `Pooler`."""

    def __init__(self, poolers: Sequence[Pooler]) -> None:
        """poolers: of modes for sequences."""
        self._poolers = poolers
        is_last = all(pooler.rows is RowsNeeded.LAST for pooler in poolers)
        self.rows = RowsNeeded.LAST if is_last else RowsNeeded.ALL

    def add(self, chunk: PooledChunk) -> PooledRows:
        return PooledRows(torch.cat([pooler.add(chunk).rows for pooler in self._poolers], -1))

    def drop(self, slot: int) -> None:
        for pooler in self._poolers:
            pooler.drop(slot)


def make_poolers(modes: Sequence[PoolingMode], step_tag_id: int | None = None) -> Pooler:
    """Makes the pooler of all modes, and joins their rows in order."""
    poolers = [make_pooler(mode, step_tag_id) for mode in modes]
    return poolers[0] if len(poolers) == 1 else JoinedPooler(poolers)


def _complete(
    reduced: Tensor, chunk: PooledChunk, kept: dict[int, Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Ints]:
    """Combines the rows of a step with what earlier ones had, and keeps rows of sequences that go on.

    Returns the rows of the sequences that are complete, and their places.
    """
    places = chunk.complete
    if chunk.is_whole:
        return reduced, places
    for i, one in enumerate(chunk.sequences()):
        if (before := kept.pop(one.slot, None)) is not None:
            reduced[i] = combine(reduced[i], before)
        if not one.is_complete:
            kept[one.slot] = reduced[i].clone()
    return reduced.index_select(0, chunk.on_device(places)), places
