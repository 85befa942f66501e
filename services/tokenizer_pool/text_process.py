"""The service's side of its text worker: sends jobs over a stream, and handles the worker's end."""

import asyncio
import logging
import socket
from collections.abc import Callable

import msgspec

from blockyard.services.tokenizer_pool.fork_server import KILL
from blockyard.services.tokenizer_pool.job_limits import JobLimits
from blockyard.services.tokenizer_pool.job_queue import JobQueue
from blockyard.services.tokenizer_pool.worker_frames import (
    LENGTH,
    Answer,
    FromServer,
    LoadFailed,
    Task,
    TokenizerLoaded,
    Work,
    WorkerEnded,
    WorkerStarted,
    framed,
)
from blockyard.shared.errors import BlockyardError, ConfigError, LoadError

log = logging.getLogger(__name__)

MAX_CONTROL_BYTES = 65536
WATCH_S = 0.5


class TextProcess:
    """A client of the fork server, whose socket is `control`, and of the text worker that it forked last."""

    def __init__(self, control: socket.socket, limits: JobLimits) -> None:
        self._control, self._limits = control, limits
        self._control.setblocking(False)
        self._jobs = JobQueue(limits)
        self._vocab_size = self._max_model_len = 0  # the model's; 0 until known
        self.worker_pid: int | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._since_s = 0.0  # start of the current job
        self._news: asyncio.Queue[FromServer | None] = asyncio.Queue()
        self._streams: list[socket.socket] = []  # of workers that started, not yet read
        self._from_server = msgspec.msgpack.Decoder(FromServer)
        self._from_worker = msgspec.msgpack.Decoder(Answer)

    async def load(self) -> list[str]:
        """Waits until the tokenizer is loaded and returns its description. Raises LoadError or ConfigError."""
        asyncio.get_running_loop().add_reader(self._control, self._receive)
        frame = await self._next()
        if isinstance(frame, LoadFailed):
            raise (ConfigError if frame.exit_code == ConfigError.exit_code else LoadError)(frame.message)
        assert isinstance(frame, TokenizerLoaded)
        return frame.notes

    def set_model(self, vocab_size: int, max_model_len: int) -> bool:
        """Sets the model's limits for later jobs. Returns True if the size of its vocabulary changed."""
        changed = vocab_size != self._vocab_size
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        return changed

    def submit(self, peer: int, work: Work) -> None:
        self._jobs.submit(peer, work)
        self._send()

    async def run(self, on_answer: Callable[[int, Answer], None]) -> None:
        """Calls `on_answer` with the peer and answer of each job until cancelled.

        Raises BlockyardError if the fork server ends.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch())
                try:
                    while True:
                        await self._one_worker(on_answer)
                finally:
                    watch.cancel()
        except* BlockyardError as group:
            raise group.exceptions[0] from None
        finally:
            self.close()

    def close(self) -> None:
        """Closes the control socket, by which the fork server and its worker end. May be called twice."""
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()

    async def _one_worker(self, on_answer: Callable[[int, Answer], None]) -> None:
        started = await self._next()
        assert isinstance(started, WorkerStarted)
        self.worker_pid = started.pid
        reader, self._writer = await asyncio.open_connection(sock=self._streams.pop(0))
        self._send()
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                on_answer(*self._take(self._from_worker.decode(await reader.readexactly(length))))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a write to a worker that has just ended raises BrokenPipeError here
        finally:
            self._writer.close()
            self._writer = None
        ended = await self._next()
        assert isinstance(ended, WorkerEnded)
        refused = self._jobs.worker_ended(ended.exit_code, self._max_model_len)
        if refused is not None:
            job, answer = refused
            log.warning("request %s: %s", job.work.request_id, answer.message)
            on_answer(job.peer, answer)
        elif ended.exit_code != 0:
            log.warning("the text worker ended (%d); its jobs are given to the next one", ended.exit_code)

    def _send(self) -> None:
        if self._writer is None:
            return
        if self._jobs.current is None:
            self._since_s = asyncio.get_running_loop().time()
        for work in self._jobs.to_send():
            self._writer.write(framed(Task(self._vocab_size, self._max_model_len, work)))

    def _take(self, answer: Answer) -> tuple[int, Answer]:
        """Sends the next job. Returns the peer with its answer."""
        job = self._jobs.answered()
        assert answer.request_id == job.work.request_id
        self._since_s = asyncio.get_running_loop().time()
        self._send()
        return job.peer, answer

    async def _watch(self) -> None:
        """Kills a worker that takes too much wall-clock time for one job, because it is stopped or blocked."""
        while True:
            await asyncio.sleep(WATCH_S)
            most_s = self._limits.silence_s + 4 * self._limits.encoding_s(self._max_model_len)
            if self._jobs.current is not None and self._writer is not None:
                now = asyncio.get_running_loop().time()
                if now - self._since_s > most_s:
                    self._since_s = now
                    self._control.send(KILL)

    async def _next(self) -> FromServer:
        frame = await self._news.get()
        if frame is None:
            raise BlockyardError("the fork server of the tokenizer ended")
        return frame

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            self._news.put_nowait(None)
            return
        self._streams.extend(socket.socket(fileno=fd) for fd in fds)
        self._news.put_nowait(self._from_server.decode(data))
