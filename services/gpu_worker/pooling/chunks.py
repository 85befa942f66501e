"""The rows of one step that are pooled."""

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
    """Sequences of a step, in the order of their rows."""

    hidden: Tensor  # [tokens, hidden]; rows behind the last sequence are padding
    sequences: list[PooledSequence]
    token_ids: Ints  # [tokens], on the host
    link: HostLink = field(default_factory=SameMemory)  # of the device of `hidden`

    @property
    def starts(self) -> Ints:
        """The first row of each sequence."""
        counts = self.counts
        return np.cumsum(counts) - counts

    @property
    def counts(self) -> Ints:
        return np.array([one.num_rows for one in self.sequences], np.int64)

    def on_device(self, values: "npt.NDArray[Any]") -> Tensor:
        """Copies numbers to where the hidden states are."""
        return put(values, self.hidden.device, self.link)
