"""The link of a GPU: pinned memory, streams beside the stream of steps, and their events."""

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import DeviceEvent, LinkEvent, LinkStream

URGENT = -1  # CUDA's priority of a stream; lower is earlier


class CudaLink:
    """Implements `HostLink` with pinned memory and CUDA streams."""

    memory = "GPU memory"
    copies = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def share(self, memory: mmap.mmap, address: int) -> object:
        return _PinnedMapping(memory, address)

    def stream(self, *, is_urgent: bool = False) -> LinkStream:
        return _CudaLinkStream(self._device, URGENT if is_urgent else 0)

    def event(self) -> DeviceEvent:
        event: DeviceEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def synchronize_thread(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def free_cached(self) -> None:
        torch.cuda.empty_cache()


class _CudaLinkStream:
    """Implements `LinkStream`."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def follow_steps(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def event(self) -> LinkEvent:
        return _CudaLinkEvent(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


class _CudaLinkEvent:
    """Implements `LinkEvent`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream = stream

    def record(self) -> None:
        self._event.record(self._stream)

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold_steps(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _PinnedMapping:
    """Lets the current device read and write a mapping, while this object lives."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        """Raises OSError if the mapping cannot be pinned."""
        self._memory = memory  # it must be mapped until it is unregistered
        result = _runtime().cudaHostRegister(address, len(memory), 0)
        if int(result):
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # takes the error, which the next operation would raise again
            raise OSError(str(_runtime().cudaGetErrorString(result)))
        weakref.finalize(self, _runtime().cudaHostUnregister, address).atexit = False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
