"""Pinned host memory that the device reads and writes asynchronously: one set of buffers for each step in flight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.slots.slot_state import NUM_RESULTS
from blockyard.services.gpu_worker.arrays import Words

FIRST_PAIRS = 4096  # initial capacity of a step's buffers


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class CompletedEvent:
    """The event of a CPU, where work is done when its call returns."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class StepBuffers:
    """Input words and results of one step. They may be used again once `done` has passed."""

    results: Words  # [NUM_RESULTS, capacity]
    done: DeviceEvent
    pairs: Tensor  # [2, some] int32
    _words: Tensor  # [some] int64
    logprobs: Tensor | None = None  # int32, log-probabilities of the step; None: no step has reported any

    def copy_logprobs(self, buffer: Tensor) -> None:
        """Copies a step's log-probabilities to the host, after the step has computed them."""
        if self.logprobs is None:
            self.logprobs = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=self._pinned)
        self.logprobs.copy_(buffer, non_blocking=True)

    def words(self, count: int) -> Tensor:
        """[count] int64, for the words of a step with prefill."""
        if count > len(self._words):
            self._words = torch.empty(1 << (count - 1).bit_length(), dtype=torch.int64, pin_memory=self._pinned)
        return self._words[:count]

    def write(self, index: Words, values: Words) -> None:
        """Pairs for `scatter_words`."""
        count = len(index)
        if count > self.pairs.shape[1]:
            size = 1 << (count - 1).bit_length()
            self.pairs = torch.empty((2, size), dtype=torch.int32, pin_memory=self._pinned)
        host = self.pairs.numpy()
        host[0, :count], host[1, :count] = index, values

    @property
    def _pinned(self) -> bool:
        return self.pairs.is_pinned()


class PinnedRing:
    """Buffers used in turn, one set a step. The device counts steps to find its results: see `gather_inputs`.

    `size` is a power of two: the device counts modulo 2**32, and finds the same buffers.
    """

    def __init__(
        self, size: int, capacity: int, device: torch.device, make_event: Callable[[], DeviceEvent] | None = None
    ) -> None:
        pinned = device.type == "cuda"
        if make_event is None:
            make_event = torch.cuda.Event if pinned else CompletedEvent
        self.results = torch.zeros((size, NUM_RESULTS, capacity), dtype=torch.int32, pin_memory=pinned)
        self._entries = [
            StepBuffers(
                one.numpy(),
                make_event(),
                torch.zeros((2, FIRST_PAIRS), dtype=torch.int32, pin_memory=pinned),
                torch.empty(0, dtype=torch.int64),
            )
            for one in self.results
        ]
        self.step = 0  # number of the last step that took buffers

    def __len__(self) -> int:
        return len(self._entries)

    def take(self) -> StepBuffers:
        """Buffers of the next step. The step that used them before must be done."""
        self.step += 1
        return self._entries[self.step % len(self._entries)]
