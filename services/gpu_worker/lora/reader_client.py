"""The worker's end of its reader process: asks for adapters, and starts the process again when it has ended."""

import logging
import signal
from typing import Protocol

import msgspec
import torch

from blockyard.services.gpu_worker.child_processes.frame_socket import FrameSocket
from blockyard.services.gpu_worker.child_processes.start import ADAPTER_READER, Child, start_child
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules
from blockyard.services.gpu_worker.lora.read_prompt import PromptLimits, ReadPrompt
from blockyard.services.gpu_worker.lora.reader_frames import (
    FolderRefused,
    FromReader,
    MemoryMapped,
    PromptRead,
    PromptSettings,
    ReaderSettings,
    ReadFolder,
    map_modules,
)
from blockyard.shared.process.cores import usable_cores

log = logging.getLogger(__name__)

MOST_DEATHS = 3  # an adapter whose reader ended so often is refused
MOST_THREADS = 4
CORES_OF_THREAD = 4  # steps and other processes come first
MOST_CPU_S = 30  # of an adapter, beside that of its bytes


class AdapterReader(Protocol):
    """Reads folders beside the steps."""

    def ask(self, job: int, path: str, *, is_prompt: bool = False) -> None:
        """Begins to read a folder. job: a number that was not used before. is_prompt: it has a prompt adapter."""

    def receive(self) -> list[tuple[int, ReadModules | str]]:
        """Returns the LoRA adapters that were read since the last call, or why they cannot be. Does not wait."""

    def receive_prompts(self) -> list[tuple[int, ReadPrompt | str]]:
        """As `receive`, of prompt adapters."""

    def close(self) -> None:
        """Reads no more."""


class ReaderProcess:
    """Implements `AdapterReader` by a process, which reads several folders at a time.

    What it was asked for when it ended is asked of the next one, which reads one at a time: then it is known which
    folder ends it.
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
        self._read: list[tuple[int, ReadModules | str]] = []  # not received yet
        self._read_prompts: list[tuple[int, ReadPrompt | str]] = []
        self._use(child or start_child(ADAPTER_READER))

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, job: int, path: str, *, is_prompt: bool = False) -> None:
        self._asked[job] = asked = ReadFolder(job, path, is_prompt)
        self._frames.send(asked)

    def receive(self) -> list[tuple[int, ReadModules | str]]:
        self._take()
        found, self._read = self._read, []
        return found

    def receive_prompts(self) -> list[tuple[int, ReadPrompt | str]]:
        self._take()
        found, self._read_prompts = self._read_prompts, []
        return found

    def _take(self) -> None:
        for frame in self._frames.receive():
            if isinstance(frame, FolderRefused):
                self._refuse(frame.job, frame.cause)
                continue
            if isinstance(frame, PromptRead):
                assert self._prompts is not None
                vectors = torch.frombuffer(bytearray(frame.vectors), dtype=self._prompts.dtype)
                prompt = ReadPrompt(vectors.view(frame.shape), frame.digest, frame.notes)
                self._read_prompts.append((frame.job, prompt))
            else:
                try:
                    modules = map_modules(f"/proc/{self._process.pid}/fd/{frame.descriptor}", frame)
                except OSError:
                    continue  # the process has ended, and is asked again
                self._frames.send(MemoryMapped(frame.descriptor))
                self._read.append(
                    (frame.job, ReadModules(frame.config, modules, frame.digest, frame.notes, frame.texts))
                )
            self._asked.pop(frame.job, None)
            self._deaths.pop(frame.job, None)
        if not self._frames.is_open:
            self._start_again()

    def _refuse(self, job: int, cause: str) -> None:
        asked = self._asked.pop(job, None)
        self._deaths.pop(job, None)
        if asked is not None and asked.is_prompt:
            self._read_prompts.append((job, cause))
        else:
            self._read.append((job, cause))

    def close(self) -> None:
        """The process has nothing to lose, and may be at the start still: nobody waits until it sees the end."""
        self._frames.close()
        self._process.kill()
        self._process.wait()

    def _use(self, child: Child) -> None:
        self._process, ours = child
        self._frames: FrameSocket[FromReader] = FrameSocket(ours, msgspec.msgpack.Decoder(FromReader))
        self._frames.send(self._settings)

    def _start_again(self) -> None:
        """Refuses the adapter that has ended the process too often."""
        self._frames.close()
        status = self._process.wait()
        log.warning("the reader of adapters has ended with status %d, and is started again", status)
        if self._asked:
            asked = next(iter(self._asked.values()))
            self._deaths[asked.job] = deaths = self._deaths.get(asked.job, 0) + 1
            if status == -signal.SIGXCPU and self._settings.threads == 1:  # such as a pattern that is matched for ever
                self._refuse(asked.job, f"it cannot be read in {self._settings.cpu_s} s of CPU time")
            elif deaths >= MOST_DEATHS:
                self._refuse(asked.job, f"the process that reads it has ended {deaths} times")
        self._settings = msgspec.structs.replace(self._settings, threads=1)
        self._use(start_child(ADAPTER_READER))
        for asked in self._asked.values():
            self._frames.send(asked)


def reader_threads() -> int:
    return min(max(usable_cores() // CORES_OF_THREAD, 1), MOST_THREADS)
