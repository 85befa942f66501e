"""The rows of one step that are pooled."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints


class PooledSequence(NamedTuple):
    """A part of a sequence that a step has computed."""

    slot: int
    first: int  # position of the first row in its sequence
    count: int  # rows
    total: int  # tokens of the whole sequence
    skip: int = 0  # leading tokens that are not pooled

    @property
    def is_complete(self) -> bool:
        return self.first + self.count == self.total


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Sequences of a step, in the order of their rows."""

    hidden: Tensor  # [tokens, hidden]; rows behind the last sequence are padding
    sequences: list[PooledSequence]
    token_ids: Ints  # [tokens], on the host

    @property
    def starts(self) -> Ints:
        """The first row of each sequence."""
        counts = self.counts
        return np.cumsum(counts) - counts

    @property
    def counts(self) -> Ints:
        return np.array([one.count for one in self.sequences], np.int64)

    def on_device(self, values: Ints) -> Tensor:
        """Copies numbers to where the hidden states are."""
        tensor = torch.from_numpy(values)
        if self.hidden.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.hidden.device, non_blocking=True)
