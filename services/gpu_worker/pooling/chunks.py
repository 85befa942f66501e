"""The rows of one step that are pooled."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.host_link import HostLink, SameMemory, put


class PooledSequence(NamedTuple):
    """A part of a sequence that a step has computed."""

    slot: int
    first: int  # position of the first row in its sequence
    num_rows: int
    total: int  # tokens of the whole sequence
    skip: int = 0  # leading tokens that are not pooled

    @property
    def is_complete(self) -> bool:
        return self.first + self.num_rows == self.total


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Sequences of a step, in the order of their rows. The columns have the fields of `PooledSequence`."""

    hidden: Tensor  # [tokens, hidden]; rows behind the last sequence are padding
    slots: Ints  # [sequences], as all columns
    firsts: Ints
    counts: Ints  # rows
    totals: Ints
    skips: Ints
    token_ids: Ints  # [tokens], on the host
    link: HostLink = field(default_factory=SameMemory)  # of the device of `hidden`

    @classmethod
    def of(cls, hidden: Tensor, sequences: Iterable[PooledSequence], token_ids: Ints) -> "PooledChunk":
        columns = np.array([tuple(one) for one in sequences], np.int64).reshape(-1, len(PooledSequence._fields))
        slots, firsts, counts, totals, skips = columns.T
        return cls(hidden, slots, firsts, counts, totals, skips, token_ids)

    @property
    def starts(self) -> Ints:
        """The first row of each sequence."""
        starts: Ints = np.cumsum(self.counts) - self.counts
        return starts

    @property
    def positions(self) -> Ints:
        """Of each row, in its sequence."""
        positions: Ints = np.arange(int(self.counts.sum())) + np.repeat(self.firsts - self.starts, self.counts)
        return positions

    @property
    def complete(self) -> Ints:
        """The places of the sequences that are complete."""
        return np.flatnonzero(self.firsts + self.counts == self.totals)

    @property
    def is_whole(self) -> bool:
        """Whether all rows of all sequences are here."""
        return bool((self.counts == self.totals).all())

    def sequences(self) -> list[PooledSequence]:
        columns = zip(self.slots, self.firsts, self.counts, self.totals, self.skips, strict=True)
        return [PooledSequence(*map(int, column)) for column in columns]

    def at(self, places: Ints) -> "PooledChunk":
        """Some of the sequences."""
        starts, counts = self.starts[places], self.counts[places]
        rows = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        hidden = self.hidden.index_select(0, self.on_device(rows))
        firsts, totals, skips = self.firsts[places], self.totals[places], self.skips[places]
        return PooledChunk(hidden, self.slots[places], firsts, counts, totals, skips, self.token_ids[rows], self.link)

    def on_device(self, values: "npt.NDArray[Any]") -> Tensor:
        """Copies numbers to where the hidden states are."""
        return put(values, self.hidden.device, self.link)
