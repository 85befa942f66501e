"""Reads adapters beside a worker: `python -m blockyard.services.gpu_worker.lora.reader_process SOCKET PARENT`.

SOCKET is an inherited descriptor, PARENT the process id of the worker. It reads, checks and converts adapters, so that
files and conversions delay no step, and ends with the worker. What depends on the model is left to the worker. Several
threads read a folder each: files, digests, copies and conversions hold no lock of the interpreter.
"""

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Container
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import torch
from setproctitle import setproctitle

from blockyard.services.gpu_worker.child_processes.frame_socket import FrameSocket
from blockyard.services.gpu_worker.lora.adapter_files import digest_of
from blockyard.services.gpu_worker.lora.added_tokens.tokenizer_check import AdapterTexts, TokenizerCheck
from blockyard.services.gpu_worker.lora.file_memory import MemoryPool
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules, read_modules
from blockyard.services.gpu_worker.lora.read_prompt import PromptLimits, read_prompt
from blockyard.services.gpu_worker.lora.reader_frames import (
    FolderBegun,
    FolderRead,
    FolderRefused,
    FromReader,
    KnownForm,
    MemoryCopied,
    MemoryMapped,
    ModulesRead,
    PromptRead,
    ReaderSettings,
    ReadFolder,
    ToReader,
    form_of,
    store_modules,
)
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_folder import read_unchanged, weights_file
from blockyard.shared.process.settings import die_with, end

log = logging.getLogger(__name__)

NICENESS = 5  # steps come first
GIB = 1 << 30
CPU_S_A_GIB = 20  # of weights, beside what any adapter may take
SLOW_S = 2.0  # after which a folder seems to wait for a disk, and another one is read beside it
MODULES_A_FRAME = 128  # which the worker takes between two steps
MOST_SLOW = 8  # such folders: a disk that hangs holds a thread of each until the process is ended


def main(arguments: list[str]) -> None:
    sock_fd, parent = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides
    die_with(parent)
    setproctitle("blockyard: adapters")
    os.nice(NICENESS)
    torch.set_num_threads(1)
    serve(FrameSocket(socket.socket(fileno=sock_fd), msgspec.msgpack.Decoder(ToReader)))
    end(0)  # threads may be in the middle of a folder


def serve(frames: FrameSocket[ToReader]) -> None:
    """Answers until the worker has closed the socket."""
    threads = ReaderThreads()
    while frames.is_open:
        threads.limit_cpu_time()
        sock = frames.sock.fileno()
        wait_s = SLOW_S if threads.is_busy else None
        select.select([sock, threads.wakes], [sock] if frames.has_unsent else [], [], wait_s)
        threads.add_for_slow_folders()
        for frame in frames.receive():
            if isinstance(frame, ReaderSettings):
                threads.start(frame)
            elif isinstance(frame, MemoryMapped | MemoryCopied):
                threads.pool.end_loan(frame.descriptor, is_copied=isinstance(frame, MemoryCopied))
            elif isinstance(frame, KnownForm):
                threads.known_forms.add(frame.form)
            elif isinstance(frame, ReadFolder):
                threads.ask(frame)
        for found in threads.take():
            frames.send(found)


class ReaderThreads:
    """Threads that read folders. All methods are the main thread's."""

    def __init__(self) -> None:
        self.wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when `take` has something
        self.known_forms, self.pool = set[bytes](), MemoryPool()
        self._asked: SimpleQueue[ReadFolder] = SimpleQueue()
        self._answers: SimpleQueue[FromReader] = SimpleQueue()
        self._cpu_s = 0  # 0: there are no settings yet
        self._sizes: dict[int, int] = {}  # bytes of the weights that are read, by job; 0: not known
        self._began_s: dict[int, float] = {}  # by job
        self._num_threads = self._num_usual = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._began_s)

    def start(self, settings: ReaderSettings) -> None:
        """Call it before the first `ask`."""
        self._cpu_s = settings.cpu_s
        check = TokenizerCheck(settings.tokenizer_path) if settings.tokenizer_path else None
        self._columns = limits_of(settings), prompt_limits_of(settings), check, settings.threads
        self._num_usual = settings.threads
        self._add_threads(settings.threads)

    def add_for_slow_folders(self) -> None:
        """Others are not to wait for a folder whose disk is slow or hangs."""
        now = time.monotonic()
        slow = sum(now - began_s >= SLOW_S for began_s in self._began_s.values())
        self._add_threads(self._num_usual + min(slow, MOST_SLOW) - self._num_threads)

    def _add_threads(self, number: int) -> None:
        for _ in range(number):
            threading.Thread(target=self._read, args=self._columns, daemon=True).start()
            self._num_threads += 1

    def limit_cpu_time(self) -> None:
        """From here on, for all threads: the pattern of a config may hold the lock of the interpreter for ever."""
        if self._cpu_s:
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            soft = int(time.process_time() + self._cpu_s + CPU_S_A_GIB * sum(self._sizes.values()) / GIB)
            resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))

    def ask(self, folder: ReadFolder) -> None:
        self._asked.put(folder)

    def take(self) -> list[FromReader]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakes)
        found: list[FromReader] = []
        with contextlib.suppress(Empty):
            while True:
                found.append(frame := self._answers.get_nowait())
                if isinstance(frame, FolderBegun):
                    self._began_s.setdefault(frame.job, time.monotonic())
                    self._sizes[frame.job] = frame.size_bytes
                elif not isinstance(frame, ModulesRead):
                    self._began_s.pop(frame.job, None)
                    self._sizes.pop(frame.job, None)
        return found

    def _read(
        self, limits: AdapterLimits, prompts: PromptLimits | None, check: TokenizerCheck | None, threads: int
    ) -> None:
        torch.set_num_threads(1)  # of this thread
        while True:
            asked = self._asked.get()
            self._say(FolderBegun(asked.job))
            with contextlib.suppress(AdapterError, OSError):  # which is answered when it is read
                self._say(FolderBegun(asked.job, weights_file(Path(asked.path)).stat().st_size))
            self._say(*answer(asked, limits, prompts, check, threads, self.pool, self.known_forms))

    def _say(self, *frames: FromReader) -> None:
        for frame in frames:
            self._answers.put(frame)
        os.eventfd_write(self.wakes, 1)


def limits_of(frame: ReaderSettings) -> AdapterLimits:
    return AdapterLimits(
        dtype=getattr(torch, frame.dtype),
        max_rank=frame.max_rank,
        with_bias=frame.with_bias,
        target_modules=tuple(frame.target_modules),
    )


def prompt_limits_of(frame: ReaderSettings) -> PromptLimits | None:
    given = frame.prompts
    return None if given is None else PromptLimits(given.max_tokens, given.width, getattr(torch, given.dtype))


def answer(
    asked: ReadFolder,
    limits: AdapterLimits,
    prompts: PromptLimits | None = None,
    check: TokenizerCheck | None = None,
    threads: int = 1,
    pool: MemoryPool | None = None,
    known_forms: Container[bytes] = (),
) -> list[FromReader]:
    """prompts: None: no prompt adapter is asked for. check: of tokenizers in folders; None: they are not read.

    threads: of each file of weights. pool: of memory; None: it is new. known_forms: of adapters that are answered
    without their modules.
    """
    folder = Path(asked.path)
    try:
        if asked.is_prompt:
            assert prompts is not None
            found = read_unchanged(folder, partial(read_prompt, folder, prompts))
            vectors = found.vectors.contiguous().view(torch.uint8).numpy().tobytes()
            return [PromptRead(asked.job, vectors, list(found.vectors.shape), found.digest, found.notes)]
        pool = pool or MemoryPool()
        read, texts = read_unchanged(folder, partial(_read_with_texts, folder, limits, check, threads, pool))
        memory, digest = read.memory, read.digest
        assert memory is not None
        places = store_modules(read.modules, memory)
        if texts is not None and texts.digest:  # other texts of the same weights are another adapter
            digest = digest_of(digest, texts.digest)
        form = form_of(read.config, places, texts)
        places = [] if form in known_forms else places
        columns = (memory.size_bytes, digest, read.config, len(places), read.notes, texts, form)
        parts = [places[i : i + MODULES_A_FRAME] for i in range(0, len(places), MODULES_A_FRAME)]
        whole = FolderRead(asked.job, pool.lend(memory), *columns)
        return [whole, *(ModulesRead(asked.job, part) for part in parts)]
    except AdapterError as e:
        return [FolderRefused(asked.job, str(e))]
    except Exception as e:  # a broken folder is no reason to end the process
        log.exception("adapter %s cannot be read", asked.path)
        return [FolderRefused(asked.job, f"it cannot be read: {type(e).__name__}")]


def _read_with_texts(
    folder: Path, limits: AdapterLimits, check: TokenizerCheck | None, threads: int, pool: MemoryPool
) -> tuple[ReadModules, AdapterTexts | None]:
    read = read_modules(folder, limits, threads, pool)
    return read, None if check is None else check.read(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
