"""The processes of one script: process 0 serves the others, which are asked for the same calls in the same order."""

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from blockyard.services.offline.adapters.loading import AskedAdapters
from blockyard.services.offline.batch import OfflineRequest
from blockyard.services.offline.external_launcher.environment import ProcessPlace
from blockyard.services.offline.outputs import GenerationError, RequestOutput, RingLost
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard
from blockyard.shared.process.frame_pipe import FramePipe

FOUND_S = 120.0  # that processes wait for each other at the start, and for a call that others have begun
RETRY_S = 0.05
SOCKET = "llm"

Outputs = list[RequestOutput]
T = TypeVar("T")


class ProcessHello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """First frame of another process."""

    rank: int
    arguments: bytes  # digest


class ProcessCall(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Another process has begun its next call."""

    method: str
    content: bytes  # digest


class RingReady(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Process 0's ring can serve."""

    card: ModelCard


class CallDone(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a call returns in all processes. `failures`: as in `GenerationError`, by index; other outputs are there."""

    outputs: list[RequestOutput | None]
    failures: dict[int, str] = {}


class CallRefused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A call raises RequestError in all processes, or RingLost."""

    text: str
    field: str = ""
    is_lost: bool = False


ToFirst = ProcessHello | ProcessCall
FromFirst = RingReady | CallDone | CallRefused


class Processes(Protocol):
    """This process among those of its script."""

    def run(self, method: str, content: bytes, work: Callable[[], Outputs]) -> Outputs:
        """Does a call once for all processes. content: digest of what all must be asked for.

        Raises what `work` raises, RequestError if processes are asked for different things, and RingLost if one of
        them is gone.
        """

    def close(self) -> None: ...


class OneProcess:
    """Implements `Processes` without others."""

    def run(self, method: str, content: bytes, work: Callable[[], Outputs]) -> Outputs:
        return work()

    def close(self) -> None:
        pass


class FirstProcess:
    """Implements `Processes` in the process that runs the ring."""

    def __init__(self, place: ProcessPlace, arguments: bytes) -> None:
        """Waits for the others. arguments: digest of this process's. Raises RingLost if they do not come."""
        self._others: dict[int, FramePipe[ToFirst]] = {}
        self._lock = threading.Lock()
        path = place.folder / SOCKET
        path.unlink(missing_ok=True)
        deadline = time.monotonic() + FOUND_S
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(place.size)
            while len(self._others) < place.size - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    self._accept(FramePipe(listener.accept()[0], ToFirst), arguments)
                except TimeoutError:
                    missing = sorted(set(range(1, place.size)) - set(self._others))
                    raise RingLost(f"processes {missing} have made no LLM for {FOUND_S:g} s") from None
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another LLM of these processes starts
            place.folder.rmdir()

    def announce(self, card: ModelCard) -> None:
        """The ring can serve."""
        self._tell(RingReady(card))

    def run(self, method: str, content: bytes, work: Callable[[], Outputs]) -> Outputs:
        if not self._others:
            return work()
        with self._lock:
            try:
                self._check(method, content)
                outputs = work()
            except GenerationError as e:
                self._tell(CallDone(e.outputs, {index: str(error) for index, error in e.failures.items()}))
                raise
            except RequestError as e:
                self._tell(CallRefused(str(e), e.field))
                raise
            except BaseException as e:
                self._tell(CallRefused(f"process 0: {e or type(e).__name__}", is_lost=True))
                raise
            self._tell(CallDone(list(outputs)))
            return outputs

    def close(self) -> None:
        for other in self._others.values():
            other.socket.close()

    def _accept(self, other: FramePipe[ToFirst], arguments: bytes) -> None:
        try:
            hello = _receive(other, FOUND_S)
        except (OSError, msgspec.DecodeError):
            other.socket.close()
            return
        if not isinstance(hello, ProcessHello) or hello.arguments != arguments:
            text = "the arguments of LLM differ between the processes"
            for one in (other, *self._others.values()):
                with contextlib.suppress(OSError):
                    one.send(CallRefused(text))
            raise RequestError(text)
        self._others[hello.rank] = other

    def _check(self, method: str, content: bytes) -> None:
        """Raises RequestError if others are asked for something else, and RingLost if one is not there."""
        different: list[int] = []
        for rank, other in sorted(self._others.items()):
            try:
                call = _receive(other, FOUND_S)
            except TimeoutError:
                raise RingLost(f"process {rank} has not called {method} for {FOUND_S:g} s") from None
            except (OSError, msgspec.DecodeError) as e:
                raise RingLost(f"process {rank} has ended: {e}") from e
            if call != ProcessCall(method, content):
                different.append(rank)
        if different:
            raise RequestError(f"the prompts or parameters of {method} differ: processes {different} from process 0")

    def _tell(self, frame: FromFirst) -> None:
        for other in self._others.values():
            with contextlib.suppress(OSError):  # the next call says that it has ended
                other.send(frame)


class OtherProcess:
    """Implements `Processes` in a process without a ring."""

    def __init__(self, place: ProcessPlace, arguments: bytes) -> None:
        """Waits for process 0. Raises RingLost if it does not come."""
        deadline, path = time.monotonic() + FOUND_S, str(place.folder / SOCKET)
        self._lock = threading.Lock()
        while True:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(path)
            except OSError as e:
                end.close()
                if time.monotonic() > deadline:
                    raise RingLost(f"process 0 has made no LLM for {FOUND_S:g} s: {e}") from e
                time.sleep(RETRY_S)
            else:
                break
        self._first: FramePipe[FromFirst] = FramePipe(end, FromFirst)
        self._ask(ProcessHello(place.rank, arguments))

    def wait_ready(self) -> ModelCard:
        """Raises RingLost if the ring fails to start."""
        frame = self._receive()
        if isinstance(frame, CallRefused):
            raise RequestError(frame.text)
        assert isinstance(frame, RingReady), f"process 0 sends {frame}"
        return frame.card

    def run(self, method: str, content: bytes, work: Callable[[], Outputs]) -> Outputs:
        """Implements `Processes`. `work` is process 0's."""
        with self._lock:
            self._ask(ProcessCall(method, content))
            match self._receive():
                case CallDone(outputs, failures):
                    if failures:
                        raise GenerationError({i: RequestError(text) for i, text in failures.items()}, outputs)
                    return [output for output in outputs if output is not None]
                case CallRefused(text, field, is_lost):
                    raise RingLost(text) if is_lost else RequestError(text, field)
                case frame:
                    raise AssertionError(f"process 0 sends {frame}")

    def close(self) -> None:
        self._first.socket.close()

    def _ask(self, frame: ToFirst) -> None:
        try:
            self._first.send(frame)
        except OSError as e:
            raise RingLost(f"process 0 has ended: {e}") from e

    def _receive(self) -> FromFirst:
        try:
            return _receive(self._first, None)
        except (OSError, msgspec.DecodeError) as e:
            raise RingLost(f"process 0 has ended: {e}") from e


def digest_of(requests: Sequence[OfflineRequest], adapters: AskedAdapters) -> bytes:
    """Returns the same bytes in all processes that are asked for the same. Seeds are those of process 0, which loads
    the adapters."""
    return _digest([[(one.prompt.work, one.prompt.text, one.params, one.priority) for one in requests], adapters])


def digest_of_arguments(arguments: Mapping[str, object]) -> bytes:
    return _digest({name: str(value) for name, value in arguments.items()})


def _digest(value: object) -> bytes:
    return hashlib.sha256(msgspec.json.encode(value, enc_hook=str, order="deterministic")).digest()


def _receive(pipe: FramePipe[T], timeout_s: float | None) -> T:
    """Raises ConnectionError if the other end is closed, TimeoutError, and msgspec's errors for other frames."""
    pipe.socket.settimeout(timeout_s)
    frame = pipe.receive()
    if frame is None:
        raise ConnectionResetError("closed")
    return frame
