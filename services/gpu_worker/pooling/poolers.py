"""Reduces the hidden states of a sequence to one row, or keeps those that are asked for, over all its steps.

All is on the device and in float32. A step reduces the rows that it has computed; of a sequence that is not complete
the result is kept by its slot, and the next step's is combined with it. Nearly all sequences are complete in one step.
"""

import enum
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.pooling.chunks import PooledChunk, PooledSequence
from blockyard.shared.config.pooling.modes import PoolingMode


class RowsNeeded(enum.Enum):
    """The rows of a step whose hidden states a pooler reads."""

    LAST = "last"  # of each sequence: the layers may drop the others
    ALL = "all"


class Pooler(Protocol):
    """One way to pool. It keeps what it has of sequences that are not complete."""

    rows: RowsNeeded

    def add(self, chunk: PooledChunk) -> list[Tensor]:
        """Adds the rows of a step. Returns those of each sequence that is complete, [any, hidden] float32: one row, or
        of a mode for tokens as many as it keeps."""

    def drop(self, slot: int) -> None:
        """Forgets what is kept of a sequence that ended or starts over."""


class SumPooler:
    """Sums, which are divided by the number of tokens, by its root, or by the sum of the positions."""

    rows = RowsNeeded.ALL

    def __init__(self, mode: PoolingMode) -> None:
        self._mode = mode
        self._kept: dict[int, Tensor] = {}

    def add(self, chunk: PooledChunk) -> list[Tensor]:
        """Implements `Pooler`."""
        counts = chunk.counts
        rows = chunk.hidden[: int(counts.sum())].float()
        if (weights := self._weights(chunk)) is not None:
            rows = rows * chunk.on_device(weights)[:, None]
        sums = torch.segment_reduce(rows, "sum", lengths=chunk.on_device(counts), axis=0, unsafe=True)
        sums = _combined(sums, chunk.sequences, self._kept, torch.add)
        places = _complete(chunk.sequences)
        divisors = np.array([self._divisor(chunk.sequences[i]) for i in places], np.float32)
        return _rows(sums.index_select(0, chunk.on_device(places)) / chunk.on_device(divisors)[:, None])

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)

    def _weights(self, chunk: PooledChunk) -> "np.ndarray[tuple[int], np.dtype[np.float32]] | None":
        """The weight of each row; None: all have 1."""
        is_weighted = self._mode is PoolingMode.WEIGHTED_MEAN
        if not is_weighted and not any(one.skip for one in chunk.sequences):
            return None
        found = []
        for one in chunk.sequences:
            positions = np.arange(one.first, one.first + one.num_rows)
            weight = (positions >= one.skip).astype(np.float32)
            found.append(weight * (positions + 1) if is_weighted else weight)
        return np.concatenate(found).astype(np.float32)

    def _divisor(self, one: PooledSequence) -> float:
        pooled = float(max(one.total - one.skip, 0))
        match self._mode:
            case PoolingMode.MEAN_SQRT_LEN:
                pooled = math.sqrt(pooled)
            case PoolingMode.WEIGHTED_MEAN:
                pooled = (one.total * (one.total + 1) - one.skip * (one.skip + 1)) / 2
        return max(pooled, 1e-9)


class MaxPooler:
    """The largest of each number."""

    rows = RowsNeeded.ALL

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def add(self, chunk: PooledChunk) -> list[Tensor]:
        """Implements `Pooler`."""
        counts = chunk.counts
        rows = chunk.hidden[: int(counts.sum())].float()
        if any(one.skip for one in chunk.sequences):
            hidden = [np.arange(one.first, one.first + one.num_rows) < one.skip for one in chunk.sequences]
            mask = torch.from_numpy(np.concatenate(hidden)).to(rows.device)
            rows = rows.masked_fill(mask[:, None], float("-inf"))
        most = torch.segment_reduce(rows, "max", lengths=chunk.on_device(counts), axis=0, unsafe=True)
        most = _combined(most, chunk.sequences, self._kept, torch.maximum)
        return _rows(most.index_select(0, chunk.on_device(_complete(chunk.sequences))))

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)


class FirstPooler:
    """The first token's row, behind what is skipped. A sequence without any other has its first token's."""

    rows = RowsNeeded.ALL

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def add(self, chunk: PooledChunk) -> list[Tensor]:
        """Implements `Pooler`."""
        found = []
        wanted = [_first_place(one) - one.first for one in chunk.sequences]
        inside = [min(max(place, 0), one.num_rows - 1) for place, one in zip(wanted, chunk.sequences, strict=True)]
        rows = chunk.hidden.index_select(0, chunk.on_device(chunk.starts + np.array(inside))).float()
        for i, (place, one) in enumerate(zip(wanted, chunk.sequences, strict=True)):
            row = rows[i] if 0 <= place < one.num_rows else self._kept.pop(one.slot, None)
            if one.is_complete:
                assert row is not None, "an earlier step had the row"
                found.append(row[None])
            elif row is not None:
                self._kept[one.slot] = row.clone()
        return found

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)


class LastPooler:
    """The last token's row."""

    rows = RowsNeeded.LAST

    def add(self, chunk: PooledChunk) -> list[Tensor]:
        """Implements `Pooler`."""
        places = _complete(chunk.sequences)
        last = (chunk.starts + chunk.counts - 1)[places]
        return _rows(chunk.hidden.index_select(0, chunk.on_device(last)).float())

    def drop(self, slot: int) -> None:
        pass


class TokenPooler:
    """The rows of all tokens, or of those that end a step."""

    rows = RowsNeeded.ALL

    def __init__(self, step_tag_id: int | None = None) -> None:
        """step_tag_id: the token that ends a step; None: all tokens are kept."""
        self._step_tag_id = step_tag_id
        self._kept: dict[int, list[Tensor]] = {}

    def add(self, chunk: PooledChunk) -> list[Tensor]:
        """Implements `Pooler`."""
        found = []
        for start, one in zip(chunk.starts.tolist(), chunk.sequences, strict=True):
            positions = np.arange(one.first, one.first + one.num_rows)
            wanted = positions >= one.skip
            if self._step_tag_id is not None:
                wanted &= chunk.token_ids[start : start + one.num_rows] == self._step_tag_id
            rows = chunk.hidden[start : start + one.num_rows]
            if not wanted.all():
                rows = rows.index_select(0, chunk.on_device(np.flatnonzero(wanted)))
            parts = [*self._kept.pop(one.slot, []), rows.float()]
            if one.is_complete:
                found.append(torch.cat(parts))
            else:
                self._kept[one.slot] = [part.clone() for part in parts]
        return found

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

    def add(self, chunk: PooledChunk) -> list[Tensor]:
        """Implements `Pooler`."""
        found = [pooler.add(chunk) for pooler in self._poolers]
        return [torch.cat(parts, -1) for parts in zip(*found, strict=True)]

    def drop(self, slot: int) -> None:
        for pooler in self._poolers:
            pooler.drop(slot)


def make_poolers(modes: Sequence[PoolingMode], step_tag_id: int | None = None) -> Pooler:
    """Makes the pooler of all modes, whose rows are joined in order."""
    poolers = [make_pooler(mode, step_tag_id) for mode in modes]
    return poolers[0] if len(poolers) == 1 else JoinedPooler(poolers)


def _complete(sequences: Sequence[PooledSequence]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The places of the sequences that are complete."""
    return np.array([i for i, one in enumerate(sequences) if one.is_complete], np.int64)


def _first_place(one: PooledSequence) -> int:
    return one.skip if one.skip < one.total else 0


def _combined(
    reduced: Tensor,
    sequences: Sequence[PooledSequence],
    kept: dict[int, Tensor],
    combine: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Combines the rows of a step with what earlier ones had, and keeps those of sequences that go on."""
    for i, one in enumerate(sequences):
        if (before := kept.pop(one.slot, None)) is not None:
            reduced[i] = combine(reduced[i], before)
        if not one.is_complete:
            kept[one.slot] = reduced[i].clone()
    return reduced


def _rows(rows: Tensor) -> list[Tensor]:
    return list(rows.unsqueeze(1).unbind(0))
