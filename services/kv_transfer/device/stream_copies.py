"""Copies on a CUDA stream beside the steps."""

import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class StreamEvent(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class SideStream(Protocol):
    """A stream beside that of the steps."""

    def use(self) -> AbstractContextManager[Any]:
        """Work that is launched in this context runs on the stream."""

    def record(self) -> StreamEvent:
        """Returns an event that is complete when all work launched so far is."""

    def host_tensor(self, num: int, dtype: torch.dtype) -> Tensor:
        """Returns host memory [num] that kernels on the stream read and write."""


class CudaStream:
    """A `SideStream` of torch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def record(self) -> StreamEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def host_tensor(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num, dtype=dtype, pin_memory=True)


@dataclass(frozen=True, slots=True)
class _StreamCopy:
    state: StreamEvent | Exception  # the error of its launch
    launch: Callable[[], object]  # keeps the memory that the copy uses
    done: Callable[[], None]
    failed: Callable[[Exception], None]


class StreamCopies:
    """Launches copies on the calling thread, in order, and reports them in order once the GPU has completed them.

    No descriptor tells that one is complete: call `poll` without waiting while there are `in_flight`. A second thread
    that waits for the GPU would report it later, because it must get the GIL first.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._open: deque[_StreamCopy] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def host_tensor(self, num: int, dtype: torch.dtype) -> Tensor:
        """See `SideStream.host_tensor`."""
        return self._stream.host_tensor(num, dtype)

    def run(self, launch: Callable[[], T]) -> T:
        """Launches work before the first copy. Raises what `launch` raises."""
        with torch.inference_mode(), self._stream.use():
            return launch()

    def submit(self, launch: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """Calls `launch`, whose kernels and copies go to the stream. It must not wait.

        A later `poll` calls `done` with its result when they are complete, or `failed` with the error of the launch or
        of the GPU. Memory that `launch` refers to is kept until then.
        """
        try:
            result = self.run(launch)
            event = self._stream.record()
        except Exception as e:  # noqa: BLE001 - `failed` gets it
            self._open.append(_StreamCopy(e, launch, _nothing, failed))
            return
        self._open.append(_StreamCopy(event, launch, lambda: done(result), failed))

    def poll(self) -> None:
        """Reports complete copies. Does not wait."""
        while self._open:
            copy = self._open[0]
            error = copy.state if isinstance(copy.state, Exception) else None
            try:
                if not isinstance(copy.state, Exception) and not copy.state.query():
                    return
            except RuntimeError as e:
                error = e
            self._open.popleft()
            if error is None:
                copy.done()
            else:
                copy.failed(error)

    def drain(self) -> None:
        """Waits for all copies, also for copies submitted meanwhile, and reports them."""
        while self._open:
            state = self._open[0].state
            if not isinstance(state, Exception):
                with contextlib.suppress(RuntimeError):  # `poll` reports it
                    state.synchronize()
            self.poll()


def _nothing() -> None:
    pass
