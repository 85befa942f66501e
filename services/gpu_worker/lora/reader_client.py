"""The worker's end of its reader process: asks for adapters, and starts the process again when it has ended."""

import logging
from typing import Protocol

import msgspec

from blockyard.services.gpu_worker.child_processes.frame_socket import FrameSocket
from blockyard.services.gpu_worker.child_processes.start import ADAPTER_READER, Child, end_child, start_child
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules
from blockyard.services.gpu_worker.lora.reader_frames import (
    FolderRefused,
    FromReader,
    MemoryMapped,
    ReaderSettings,
    ReadFolder,
    map_modules,
)

log = logging.getLogger(__name__)

MOST_DEATHS = 3  # an adapter whose reader ended so often is refused


class AdapterReader(Protocol):
    """Reads folders beside the steps, one at a time."""

    def ask(self, job: int, path: str) -> None:
        """Begins to read a folder. job: a number that was not used before."""

    def receive(self) -> list[tuple[int, ReadModules | str]]:
        """Returns what was read since the last call, or why it cannot be. Does not wait."""

    def close(self) -> None:
        """Reads no more."""


class ReaderProcess:
    """Implements `AdapterReader` by a process. What it was asked for when it ended is asked of the next one."""

    def __init__(self, limits: AdapterLimits, child: Child | None = None) -> None:
        """child: one that is already started; None: starts one."""
        dtype = str(limits.dtype).removeprefix("torch.")
        self._settings = ReaderSettings(dtype, limits.max_rank, limits.with_bias, list(limits.target_modules))
        self._asked: dict[int, str] = {}  # in order: the process reads the first
        self._deaths: dict[int, int] = {}  # by job
        self._use(child or start_child(ADAPTER_READER))

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, job: int, path: str) -> None:
        self._asked[job] = path
        self._frames.send(ReadFolder(job, path))

    def receive(self) -> list[tuple[int, ReadModules | str]]:
        found: list[tuple[int, ReadModules | str]] = []
        for frame in self._frames.receive():
            if isinstance(frame, FolderRefused):
                found.append((frame.job, frame.cause))
            else:
                try:
                    modules = map_modules(f"/proc/{self._process.pid}/fd/{frame.descriptor}", frame)
                except OSError:
                    continue  # the process has ended, and is asked again
                self._frames.send(MemoryMapped(frame.descriptor))
                found.append((frame.job, ReadModules(frame.config, modules, frame.digest, frame.notes)))
        for job, _ in found:
            self._asked.pop(job, None)
            self._deaths.pop(job, None)
        return found if self._frames.is_open else [*found, *self._start_again()]

    def close(self) -> None:
        """The process ends by itself when its socket is closed."""
        self._frames.close()
        end_child(self._process)

    def _use(self, child: Child) -> None:
        self._process, ours = child
        self._frames: FrameSocket[FromReader] = FrameSocket(ours, msgspec.msgpack.Decoder(FromReader))
        self._frames.send(self._settings)

    def _start_again(self) -> list[tuple[int, ReadModules | str]]:
        """Returns the adapter that has ended the process too often."""
        self._frames.close()
        status = self._process.wait()
        log.warning("the reader of adapters has ended with status %d, and is started again", status)
        refused: list[tuple[int, ReadModules | str]] = []
        if self._asked:
            job = next(iter(self._asked))
            self._deaths[job] = self._deaths.get(job, 0) + 1
            if self._deaths[job] >= MOST_DEATHS:
                path = self._asked.pop(job)
                refused.append((job, f"{path}: the process that reads it has ended {self._deaths.pop(job)} times"))
        self._use(start_child(ADAPTER_READER))
        for job, path in self._asked.items():
            self._frames.send(ReadFolder(job, path))
        return refused
