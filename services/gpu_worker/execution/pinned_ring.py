"""Host memory that the device reads and writes asynchronously: one set of buffers for each step in flight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.slots.slot_state import NUM_RESULTS
from blockyard.services.gpu_worker.arrays import Words
from blockyard.services.gpu_worker.host_link import DeviceEvent, HostLink

FIRST_PAIRS = 4096  # initial capacity of a step's buffers


@dataclass(slots=True)
class StepBuffers:
    """Input words and results of one step. They may be used again once `done` has passed."""

    results: Words  # [NUM_RESULTS, capacity]
    done: DeviceEvent
    pairs: Tensor  # [2, some] int32
    _words: Tensor  # [some] int64
    _link: HostLink
    logprobs: Tensor | None = None  # int32, log-probabilities of the step; None: no step has reported any

    def copy_logprobs(self, buffer: Tensor) -> None:
        """Copies a step's log-probabilities to the host, after the step has computed them."""
        if self.logprobs is None:
            self.logprobs = self._link.host_tensor(buffer.shape, buffer.dtype)
        self.logprobs.copy_(buffer, non_blocking=True)

    def words(self, count: int) -> Tensor:
        """[count] int64, for the words of a step with prefill."""
        if count > len(self._words):
            self._words = self._link.host_tensor((1 << (count - 1).bit_length(),), torch.int64)
        return self._words[:count]

    def write(self, index: Words, values: Words) -> None:
        """Pairs for `scatter_words`."""
        count = len(index)
        if count > self.pairs.shape[1]:
            size = 1 << (count - 1).bit_length()
            self.pairs = self._link.host_tensor((2, size), torch.int32)
        host = self.pairs.numpy()
        host[0, :count], host[1, :count] = index, values


class PinnedRing:
    """Buffers used in turn, one set a step. The device counts steps to find its results: see `gather_inputs`.

    `size` is a power of two: the device counts modulo 2**32, and finds the same buffers.
    """

    def __init__(
        self, size: int, capacity: int, link: HostLink, make_event: Callable[[], DeviceEvent] | None = None
    ) -> None:
        """make_event: None for the events of `link`."""
        self.results = link.host_tensor((size, NUM_RESULTS, capacity), torch.int32).zero_()
        self._entries = [
            StepBuffers(
                one.numpy(),
                (make_event or link.event)(),
                link.host_tensor((2, FIRST_PAIRS), torch.int32).zero_(),
                torch.empty(0, dtype=torch.int64),
                link,
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
