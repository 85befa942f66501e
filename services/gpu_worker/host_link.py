"""The link between the memory of a device and host memory: streams of copies, their events, and host memory for them.

A worker's `WeightTable` has the link of its device. Code that copies between the two memories asks it, and is the same
for all devices.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor


class LinkEvent(Protocol):
    """Marks a place in the work of a `LinkStream`."""

    def record(self) -> None:
        """The event is complete when all work is that was launched on its stream so far."""

    def query(self) -> bool:
        """Whether it is complete."""

    def synchronize(self) -> None:
        """Waits until it is complete."""

    def hold_steps(self) -> None:
        """Later launches on the stream of steps wait for the event."""


class LinkStream(Protocol):
    """A queue of copies beside the stream of steps."""

    def use(self) -> AbstractContextManager[Any]:
        """Work that is launched in this context runs on the stream."""

    def follow_steps(self) -> None:
        """Later launches on this stream wait for all that the stream of steps has now."""

    def event(self) -> LinkEvent:
        """Returns a new event of this stream, complete until it is recorded."""

    def synchronize(self) -> None:
        """Waits for all work of the stream."""


class HostLink(Protocol):
    """What a device offers to copies between its memory and host memory."""

    memory: str  # the device's memory in messages
    copies: bool  # False: the device computes in host memory

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized host memory, from and to which the device copies while the host goes on."""

    def stream(self) -> LinkStream:
        """Returns a new stream."""

    def synchronize(self) -> None:
        """Waits for all work of the device."""

    def free_cached(self) -> None:
        """Gives memory that torch keeps for later tensors back to the device."""


def put(values: "npt.NDArray[Any]", device: torch.device, link: HostLink) -> Tensor:
    """Copies numbers of the host to the device, which need not be done when this returns."""
    tensor = torch.from_numpy(values)
    if not link.copies:
        return tensor
    host = link.host_tensor(tensor.shape, tensor.dtype)
    host.copy_(tensor)
    return host.to(device, non_blocking=True)


class SameMemory:
    """The `HostLink` of a CPU: its tensors are in host memory, and a copy is complete when its call returns."""

    memory = "memory"
    copies = False

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def stream(self) -> LinkStream:
        return _Immediate()

    def synchronize(self) -> None:
        """All work is complete."""

    def free_cached(self) -> None:
        """Nothing is kept."""


class _Immediate:
    """A `LinkStream` and its `LinkEvent` where work is complete when its call returns."""

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def follow_steps(self) -> None: ...

    def event(self) -> LinkEvent:
        return self

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def hold_steps(self) -> None: ...
