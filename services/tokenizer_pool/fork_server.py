"""The fork server: loads the tokenizer once and forks text workers, one at a time.

A text worker is a forked process that renders, encodes and decodes one job after the other, and may be killed. It is
replaced in milliseconds, with the tokenizer and compiled templates in memory. The server itself runs no client's text
or template. It is forked from the service process before that has any thread.
"""

import gc
import logging
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec
from setproctitle import setproctitle

from blockyard.services.tokenizer_pool.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.job_limits import JobLimits, ProcessLimits
from blockyard.services.tokenizer_pool.text_codec import TextCodec
from blockyard.services.tokenizer_pool.token_chars import max_token_chars
from blockyard.services.tokenizer_pool.worker_frames import (
    Answer,
    FromServer,
    LoadFailed,
    Task,
    TokenizerLoaded,
    Work,
    WorkerEnded,
    WorkerStarted,
    encode,
    framed,
    pair,
    read_frame,
)
from blockyard.shared import tokenizer_files
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import BlockyardError, ConfigError, RequestError
from blockyard.shared.messages import TextRejected
from blockyard.shared.process import settings


def serve_jobs(sock: socket.socket, texts: TextCodec, limits: JobLimits) -> None:
    """Runs a text worker: answers jobs in order until the service closes the stream or the process grows too much."""
    phases = ProcessLimits(limits)
    texts.set_phases(phases)
    decoder = msgspec.msgpack.Decoder(Task)
    with sock, sock.makefile("rb") as stream:
        while (data := read_frame(stream)) is not None:
            task = decoder.decode(data)
            del data
            texts.set_model_vocab_size(task.vocab_size)
            phases.begin(task.max_model_len)
            sock.sendall(framed(_answer(texts, task.work)))
            if phases.has_grown():
                return


def _answer(texts: TextCodec, work: Work) -> Answer:
    try:
        return texts.answer(work)
    except MemoryError as e:  # outside the phases: block hashes, the answer itself
        traceback.clear_frames(e.__traceback__)
        return TextRejected(work.request_id, "prompt", "the prompt needs too much memory")


log = logging.getLogger(__name__)

KILL = b"k"  # from the service: end the worker
PAUSE_S = 0.05  # before the next worker, in case one ends right after its start


def start(config: TokenizerConfig, limits: JobLimits) -> socket.socket:
    """Forks the server. Returns the control socket, on which it reports the start and end of workers."""

    def load() -> Workload:
        return TextWorkload(config, limits)

    ours, theirs = pair(socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        name = config.process.name
        _run(parent, f"{name}: fork server", lambda: ForkServer(theirs, f"{name}: text", load).run())
    theirs.close()
    return ours


def load_texts(config: TokenizerConfig) -> tuple[TextCodec, list[str]]:
    """Returns the configured tokenizer and a description of it."""
    # a single text is encoded by one thread; a pool of threads would only take memory
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    files = tokenizer_files.load(config.tokenizer_path)
    templates = files.chat_templates if config.chat_template is None else {"default": config.chat_template}
    chats = ChatTemplates(templates, files.special_tokens)
    try:
        chats.check()
    except RequestError as e:
        if config.chat_template is not None:
            raise ConfigError(f"--chat-template: {e}") from e
        log.warning("chats will be refused: %s", e)
    texts = TextCodec(files.tokenizer, files.vocab_size, chats, config, max_token_chars(files.tokenizer))
    return texts, [f"vocabulary {files.vocab_size}", f"chat template {'yes' if templates else 'no'}"]


class Workload(Protocol):
    """What a fork server loads once, and its workers do."""

    notes: list[str]  # describe what was loaded

    def serve(self, sock: socket.socket) -> None:
        """The life of a worker: answers jobs on the stream."""

    def on_ended(self, exit_code: int) -> int:
        """Called in the server after each worker. Returns the exit code that the service is told."""


class TextWorkload:
    """The tokenizer and chat templates of a model."""

    def __init__(self, config: TokenizerConfig, limits: JobLimits) -> None:
        self._texts, self.notes = load_texts(config)
        self._limits = limits

    def serve(self, sock: socket.socket) -> None:
        serve_jobs(sock, self._texts, self._limits)

    def on_ended(self, exit_code: int) -> int:
        return exit_code


class ForkServer:
    """Runs until the service closes the control socket. `name` is that of its service."""

    def __init__(self, control: socket.socket, name: str, load: Callable[[], Workload]) -> None:
        self._control, self._name, self._load = control, name, load

    def run(self) -> None:
        try:
            workload = self._load()
        except BlockyardError as e:
            self._tell(LoadFailed(e.exit_code, str(e)))
            return
        gc.collect()
        gc.freeze()  # a garbage collection would copy pages shared with workers
        self._tell(TokenizerLoaded(workload.notes))
        while self._one_worker(workload):
            pass

    def _one_worker(self, workload: Workload) -> bool:
        """Runs one worker from start to end. Returns False once the service is gone."""
        ours, theirs = pair(socket.SOCK_STREAM)
        alive, held = os.pipe()  # the kernel closes the worker's end for any kind of exit
        parent, began = os.getpid(), time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            ours.close()
            os.close(alive)
            _run(parent, f"{self._name} worker", lambda: workload.serve(theirs))
        theirs.close()
        os.close(held)
        with ours:
            socket.send_fds(self._control, [encode(WorkerStarted(pid))], [ours.fileno()])
        served = self._wait(pid, alive)
        os.close(alive)
        _, status = os.waitpid(pid, 0)
        if served:
            self._tell(WorkerEnded(workload.on_ended(os.waitstatus_to_exitcode(status))))
            if time.monotonic() - began < PAUSE_S:
                time.sleep(PAUSE_S)
        return served

    def _wait(self, pid: int, alive: int) -> bool:
        """Waits until the worker has ended. Returns False if the service is gone."""
        while True:
            ready, _, _ = select.select([alive, self._control.fileno()], [], [])
            if alive in ready:
                return True
            word = self._control.recv(len(KILL))
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still valid
            if word != KILL:
                return False

    def _tell(self, frame: FromServer) -> None:
        self._control.send(encode(frame))


def _run(parent: int, name: str, work: Callable[[], None]) -> NoReturn:
    """Runs `work` as the whole life of a forked process, which ends with its parent."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        settings.die_with(parent)
        setproctitle(f"blockyard: {name}")
        work()
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the other end is gone
    except BaseException:
        log.exception("%s ends", name)
    finally:
        os._exit(code)
