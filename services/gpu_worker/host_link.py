"""The link between the memory of a device and host memory: streams of copies, their events, and host memory for them.

A worker's `WeightTable` has the link of its device. Code that copies between the two memories asks it, and is the same
for all devices.
"""

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """Marks a place in the work of a device."""

    def record(self) -> None:
        """The event is complete when all work is that was launched on its stream so far."""

    def query(self) -> bool:
        """Whether it is complete."""

    def synchronize(self) -> None:
        """Waits until it is complete."""


class LinkEvent(DeviceEvent, Protocol):
    """Marks a place in the work of a `LinkStream`."""

    def hold_steps(self) -> None:
        """Later launches on the stream of steps wait for the event."""


class LinkStream(Protocol):
    """A queue of copies beside the stream of steps."""

    def use(self) -> AbstractContextManager[Any]:
        """Work that is launched in this context runs on the stream."""

    def follow_steps(self) -> None:
        """Later launches on this stream wait for all that the stream of steps has now."""

    def keep(self, tensor: Tensor) -> None:
        """Memory of the stream of steps is not given to other tensors before what this stream has now is complete."""

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

    def share(self, memory: mmap.mmap, address: int) -> object:
        """Lets the device read and write mapped memory at this address, while the object that is returned lives.

        Raises OSError.
        """

    def stream(self, *, is_urgent: bool = False) -> LinkStream:
        """Returns a new stream. is_urgent: its small kernels start between those of steps, which fill the device."""

    def event(self) -> DeviceEvent:
        """Returns a new event, complete until it is recorded, of the stream that is current then."""

    def synchronize(self) -> None:
        """Waits for all work of the device."""

    def synchronize_thread(self) -> None:
        """Waits for what this thread has launched on its current stream."""

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

    def share(self, memory: mmap.mmap, address: int) -> object:
        return memory

    def stream(self, *, is_urgent: bool = False) -> LinkStream:
        return _SameStream()

    def event(self) -> DeviceEvent:
        return CompletedEvent()

    def synchronize(self) -> None:
        """All work is complete."""

    def synchronize_thread(self) -> None:
        """All work is complete."""

    def free_cached(self) -> None:
        """Nothing is kept."""


class CompletedEvent:
    """A `LinkEvent` where work is complete when its call returns."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def hold_steps(self) -> None: ...


class _SameStream:
    """A `LinkStream` where work is complete when its call returns."""

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def follow_steps(self) -> None: ...

    def keep(self, tensor: Tensor) -> None: ...

    def event(self) -> LinkEvent:
        return CompletedEvent()

    def synchronize(self) -> None: ...
