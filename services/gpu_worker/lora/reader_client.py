"""The worker's end of its reader process: asks for adapters, and starts the process again when it has ended."""

import contextlib
import logging
import signal
import subprocess
import time
import weakref
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from blockyard.services.gpu_worker.child_processes.frame_socket import FrameSocket
from blockyard.services.gpu_worker.child_processes.job_deadlines import JobDeadlines
from blockyard.services.gpu_worker.child_processes.start import ADAPTER_READER, Child, start_child
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules
from blockyard.services.gpu_worker.lora.read_prompt import PromptLimits, ReadPrompt
from blockyard.services.gpu_worker.lora.reader_frames import (
    ArrivingModules,
    FolderBegun,
    FolderRead,
    FolderRefused,
    FromReader,
    KnownForm,
    MemoryCopied,
    MemoryMapped,
    ModulesRead,
    PromptRead,
    PromptSettings,
    ReaderSettings,
    ReadFolder,
)
from blockyard.shared.process.cores import usable_cores

log = logging.getLogger(__name__)

MOST_DEATHS = 3  # an adapter whose reader ended so often is refused
MOST_THREADS = 4
CORES_OF_THREAD = 4  # steps and other processes come first
RECEIVE_S = 0.001  # for which answers are taken between two steps; one may take a few ms
MOST_CPU_S = 30  # of an adapter, beside that of its bytes
# Of an adapter, or without a word of a process: a start of Python and torch takes a tenth of it on a busy machine.
MOST_S = 60.0
S_A_GIB = 60.0  # beside that: a network disk that reads 17 MiB/s is slow, and does not hang
LATE = 504  # HTTP status: another attempt may succeed
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class NotRead:
    """Why an adapter cannot be read."""

    cause: str
    status: int = 400  # HTTP status


class AdapterReader(Protocol):
    """Reads folders beside the steps."""

    def ask(self, job: int, path: str, *, is_prompt: bool = False) -> None:
        """Begins to read a folder. job: a number that was not used before. is_prompt: it has a prompt adapter."""

    def receive(self) -> list[tuple[int, ReadModules | NotRead]]:
        """Returns the LoRA adapters that were read since the last call, or why they cannot be. Does not wait."""

    def receive_prompts(self) -> list[tuple[int, ReadPrompt | NotRead]]:
        """As `receive`, of prompt adapters."""

    def know(self, form: bytes) -> None:
        """Adapters of this form come without their modules from here on, or did so when they were asked for before."""

    def close(self) -> None:
        """Reads no more."""


class ReaderProcess:
    """Implements `AdapterReader` by a process, which reads several folders at a time.

    What it was asked for when it ended is asked of the next one, which reads one at a time: then it is known which
    folder ends it. A folder that takes too long, as on a disk that hangs, is refused. Its thread may never end, so that
    another process takes over as soon as no other folder is read.
    """

    def __init__(self, limits: AdapterLimits, child: Child | None = None, prompts: PromptLimits | None = None) -> None:
        """child: one that is already started; None: starts one. prompts: None: it reads no prompt adapters."""
        dtype = str(limits.dtype).removeprefix("torch.")
        self._prompts, of_prompts = prompts, None
        if prompts is not None:
            of_prompts = PromptSettings(prompts.max_tokens, prompts.width, str(prompts.dtype).removeprefix("torch."))
        targets = list(limits.target_modules)
        self._settings = ReaderSettings(
            *(dtype, limits.max_rank, limits.with_bias, targets, of_prompts, limits.tokenizer_path),
            reader_threads(),
            MOST_CPU_S,
        )
        self._asked: dict[int, ReadFolder] = {}  # by job, in order: a process with one thread reads the first
        self._deaths: dict[int, int] = {}  # by job
        self._read: list[tuple[int, ReadModules | NotRead]] = []  # not received yet
        self._read_prompts: list[tuple[int, ReadPrompt | NotRead]] = []
        self._ending: list[subprocess.Popen[bytes]] = []  # killed: they end once the disk lets them
        self._forms: list[bytes] = []  # whose modules are known
        self._use(child or start_child(ADAPTER_READER))

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, job: int, path: str, *, is_prompt: bool = False) -> None:
        if not self._asked:
            self._deadlines.hear()
        self._asked[job] = asked = ReadFolder(job, path, is_prompt)
        self._frames.send(asked)

    def receive(self) -> list[tuple[int, ReadModules | NotRead]]:
        self._take()
        found, self._read = self._read, []
        return found

    def receive_prompts(self) -> list[tuple[int, ReadPrompt | NotRead]]:
        self._take()
        found, self._read_prompts = self._read_prompts, []
        return found

    def _take(self) -> None:
        end_s = time.monotonic() + RECEIVE_S
        self._give_back()
        while frames := self._frames.receive(1):
            self._deadlines.hear()
            self._take_frame(frames[0])
            if time.monotonic() >= end_s:
                return
        if not self._frames.is_open:
            self._start_again()
        self._end_late_ones()

    def _take_frame(self, frame: FromReader) -> None:
        match frame:
            case FolderRead() if frame.job not in self._asked:  # it was refused, as it took too long
                self._frames.send(MemoryMapped(frame.descriptor))
            case _ if frame.job not in self._asked:
                pass
            case FolderBegun(job, size_bytes):
                self._deadlines.begin(job, MOST_S + S_A_GIB * size_bytes / GIB)
            case FolderRefused(job, cause):
                self._refuse(job, cause)
            case PromptRead(job, data, shape, digest, notes):
                assert self._prompts is not None
                vectors = torch.frombuffer(bytearray(data), dtype=self._prompts.dtype)
                self._read_prompts.append((job, ReadPrompt(vectors.view(shape), digest, notes)))
                self._forget(job)
            case FolderRead(job, descriptor):
                with contextlib.suppress(OSError):  # the process has ended, and is asked again
                    self._arriving[job] = ArrivingModules(f"/proc/{self._process.pid}/fd/{descriptor}", frame)
                    if frame.num_modules:
                        self._frames.send(MemoryMapped(descriptor))
                    else:
                        self._copied[descriptor] = weakref.ref(self._arriving[job].memory)
                        self._take_whole(job)
                self._deadlines.end(job)
            case ModulesRead(job) if (arriving := self._arriving.get(job)) is not None:
                arriving.add(frame)
                self._take_whole(job)

    def _give_back(self) -> None:
        """Says which memory is not used any more."""
        for descriptor, ref in list(self._copied.items()):
            if (memory := ref()) is None or memory.is_closed:
                del self._copied[descriptor]
                self._frames.send(MemoryMapped(descriptor) if memory is None else MemoryCopied(descriptor))

    def _take_whole(self, job: int) -> None:
        arriving = self._arriving[job]
        if arriving.is_whole:
            read, memory = self._arriving.pop(job).read, arriving.memory if arriving.read.form else None
            columns = read.config, arriving.modules, read.digest, read.notes, read.texts, memory, read.form
            self._read.append((job, ReadModules(*columns)))
            self._forget(job)

    def _end_late_ones(self) -> None:
        for job in self._deadlines.overdue():
            self._is_stuck = True
            seconds = self._deadlines.end(job)
            log.warning("the adapter in %s is not read after %.0f s, and is given up", self._asked[job].path, seconds)
            self._refuse(job, f"it was not read within {seconds:.0f} s: its disk is slow, or hangs", LATE)
        if self._asked and self._deadlines.is_silent():
            job = next(iter(self._asked))
            log.warning("the reader of adapters says nothing for %.0f s, and is replaced", MOST_S)
            if self._count_death(job) >= MOST_DEATHS:
                self._refuse(job, f"the process that reads it has hung {MOST_DEATHS} times", LATE)
            self._replace()
        elif self._is_stuck and not self._deadlines.has_begun:
            self._replace()
        self._ending = [process for process in self._ending if process.poll() is None]

    def _forget(self, job: int) -> None:
        self._asked.pop(job, None)
        self._deaths.pop(job, None)
        self._deadlines.end(job)

    def _refuse(self, job: int, cause: str, status: int = 400) -> None:
        asked, refusal = self._asked[job], NotRead(cause, status)
        if asked.is_prompt:
            self._read_prompts.append((job, refusal))
        else:
            self._read.append((job, refusal))
        self._forget(job)

    def know(self, form: bytes) -> None:
        self._forms.append(form)
        self._frames.send(KnownForm(form))

    def close(self) -> None:
        """The process has nothing to lose, and may be at the start still: nobody waits until it sees the end."""
        self._frames.close()
        self._process.kill()
        self._process.wait()

    def _use(self, child: Child) -> None:
        self._process, ours = child
        self._frames: FrameSocket[FromReader] = FrameSocket(ours, msgspec.msgpack.Decoder(FromReader))
        self._frames.send(self._settings)
        for form in self._forms:
            self._frames.send(KnownForm(form))
        self._deadlines, self._is_stuck = JobDeadlines(MOST_S), False
        self._arriving: dict[int, ArrivingModules] = {}  # by job
        # memory that adapters are copied out of, by the process's descriptor
        self._copied: dict[int, weakref.ref[FileMemory]] = {}

    def _count_death(self, job: int) -> int:
        self._deaths[job] = deaths = self._deaths.get(job, 0) + 1
        return deaths

    def _replace(self) -> None:
        """Starts another process. Nobody waits for the end of this one, which may take as long as its disk hangs."""
        self._frames.close()
        self._process.kill()
        self._ending.append(self._process)
        self._use_another()

    def _use_another(self) -> None:
        self._use(start_child(ADAPTER_READER))
        for asked in self._asked.values():
            self._frames.send(asked)

    def _start_again(self) -> None:
        """Refuses the adapter that has ended the process too often."""
        self._frames.close()
        status = self._process.wait()
        log.warning("the reader of adapters has ended with status %d, and is started again", status)
        if self._asked:
            begun = self._deadlines.last_begun  # the others are slow, and have not ended it
            job = next(iter(self._asked)) if begun is None else begun
            deaths = self._count_death(job)
            if status == -signal.SIGXCPU and self._settings.threads == 1:  # such as a pattern that is matched for ever
                self._refuse(job, f"it cannot be read in {self._settings.cpu_s} s of CPU time")
            elif deaths >= MOST_DEATHS:
                self._refuse(job, f"the process that reads it has ended {deaths} times")
        self._settings = msgspec.structs.replace(self._settings, threads=1)
        self._use_another()


def reader_threads() -> int:
    return min(max(usable_cores() // CORES_OF_THREAD, 1), MOST_THREADS)
