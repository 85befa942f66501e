"""Logits processors of users: functions that change the logits of a slot before every other step.

A processor is called with (output ids, logits) or (prompt ids, output ids, logits), lists of int and a float32 tensor
[vocab], and returns the logits to use. One with a parameter `extra_args` also gets the request's `vllm_xargs`, or {},
and so does the constructor of a class. One that raises, returns something else or takes longer than LIMIT_S fails its
request alone. Processors run in a thread: a step waits for them, but not for one that hangs.
"""

import ctypes
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module  # users name their modules
from typing import Any

import msgspec
import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import LinkStream
from blockyard.shared.messages import LogitsProcessor

EXTRA_ARGS = "extra_args"  # a parameter
LIMIT_S = 1.0  # of all processors of a request, for one token


class ProcessorError(Exception):
    """A processor of a request failed. The message names it."""


class _Stopped(BaseException):
    """Raised in the thread of a processor that takes too long."""


@dataclass(frozen=True, slots=True)
class UserProcessor:
    """A processor of one slot, with its arguments bound."""

    name: str
    call: Callable[..., object]
    takes_prompt: bool
    extra_args: dict[str, Any] | None = None  # None: it takes none

    def apply(self, prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
        """The logits that the processor returns, on the device and in the dtype of `logits`. Raises ProcessorError."""
        try:
            known = (prompt_ids, output_ids) if self.takes_prompt else (output_ids,)
            extra = {} if self.extra_args is None else {EXTRA_ARGS: self.extra_args}
            changed = self.call(*known, logits, **extra)
        except Exception as e:
            raise ProcessorError(f"logits processor {self.name}: {type(e).__name__}: {e}") from e
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            what = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ProcessorError(f"logits processor {self.name}: returned {what}, not logits of {list(logits.shape)}")
        return changed.to(logits)


def load_processor(named: LogitsProcessor, extra_args: bytes = b"") -> UserProcessor:
    """Imports a processor: a class is instantiated with its arguments, and so is a function that has any.

    extra_args: JSON object of the request. Raises ProcessorError.
    """
    try:
        found = _find(named.name)
        args, kwargs, extra = (
            msgspec.json.decode(part) if part else None for part in (named.args, named.kwargs, extra_args)
        )
        call: Any = found
        if inspect.isclass(found) and EXTRA_ARGS in inspect.signature(found).parameters:
            kwargs = {EXTRA_ARGS: extra or {}, **(kwargs or {})}
        if inspect.isclass(found) or args or kwargs:
            call = found(*(args or ()), **(kwargs or {}))
        if not callable(call):
            raise TypeError(f"{type(call).__name__} cannot be called")
        names = [*inspect.signature(call).parameters]
        num = len(names) - names.count(EXTRA_ARGS)
        if num not in (2, 3):
            raise TypeError(f"it has {num} parameters, not 2 or 3")
    except Exception as e:  # a user's module may raise anything
        raise ProcessorError(f"logits processor {named.name}: {type(e).__name__}: {e}") from e
    return UserProcessor(named.name, call, num == 3, (extra or {}) if EXTRA_ARGS in names else None)


def _find(name: str) -> Any:
    module, dot, attribute = name.replace(":", ".").rpartition(".")
    if not dot:
        raise ImportError("a name needs a module, as in package.module.name")
    return getattr(import_module(module), attribute)


class ProcessorThread:
    """Runs processors one after another, each job under a limit of time."""

    def __init__(self, stream: LinkStream, limit_s: float = LIMIT_S) -> None:
        """stream: that processors run on. Each thread has a current stream of its own."""
        self._stream, self._limit_s = stream, limit_s
        self._jobs: queue.SimpleQueue[Callable[[], Tensor]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Tensor | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(
        self, processors: Sequence[UserProcessor], prompt_ids: list[int], output_ids: list[int], logits: Tensor
    ) -> Tensor:
        """Applies processors to logits [vocab] in order. Raises ProcessorError."""

        def job() -> Tensor:
            with self._stream.use():
                changed = logits.float().clone()
                for processor in processors:
                    changed = processor.apply(prompt_ids, output_ids, changed)
                return changed

        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._answers), name="logits processors", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)
        try:
            answer = self._answers.get(timeout=self._limit_s)
        except queue.Empty:
            self._abandon()
            names = ", ".join(one.name for one in processors)
            raise ProcessorError(f"logits processor {names}: took longer than {self._limit_s:g} s") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _abandon(self) -> None:
        """Stops the thread at its next line of Python; later jobs get another thread."""
        thread, self._thread = self._thread, None
        self._jobs, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
        if thread is not None and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))


def _work(
    jobs: "queue.SimpleQueue[Callable[[], Tensor]]", answers: "queue.SimpleQueue[Tensor | BaseException]"
) -> None:
    while True:
        job = jobs.get()
        try:
            with torch.inference_mode():
                answers.put(job())
        except _Stopped:
            return
        except ProcessorError as e:
            answers.put(e)
        del job  # it holds the logits
