"""The service's side of a fork server and its workers: sends jobs over streams, and handles the end of either."""

import asyncio
import contextlib
import logging
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from blockyard.services.tokenizer_pool.workers.fork_server import ServerSettings
from blockyard.services.tokenizer_pool.workers.job_limits import NUM_WORKERS
from blockyard.services.tokenizer_pool.workers.job_queue import KILLED_S, JobQueue, WorkerEnd
from blockyard.services.tokenizer_pool.workers.worker_frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    Answer,
    FromServer,
    Kill,
    Loaded,
    LoadFailed,
    ModelVocabulary,
    Task,
    Work,
    WorkerEnded,
    WorkerStarted,
    encode,
    framed,
    pair,
)
from blockyard.shared.errors import BlockyardError, ConfigError, LoadError
from blockyard.shared.process.signals import ended_from_outside

log = logging.getLogger(__name__)

WATCH_S = 0.5
EXIT_S = 2.0  # between the end of a server's socket and of its process
SERVER_S = 5.0  # a server that replaces no worker in this time stands still
MAX_STARTS = 3  # of servers in a row that end before they have loaded, without having been killed
OnAnswer = Callable[[int, Answer], None]


class ServerEnded(Exception):
    """The fork server ended, and its workers with it."""


class Server:
    """A running fork server."""

    def __init__(self, module: str, settings: bytes) -> None:
        self._control, theirs = pair(socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._news: asyncio.Queue[FromServer | None] = asyncio.Queue()
        self._streams: list[socket.socket] = []  # of workers that started, not yet taken
        self._decoder = msgspec.msgpack.Decoder(FromServer)
        self.is_stopped = False
        with theirs:
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            fds = [theirs.fileno()]
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.PIPE, start_new_session=True)
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(settings)
        asyncio.get_running_loop().add_reader(self._control, self._receive)

    def tell(self, frame: Kill | ModelVocabulary) -> None:
        with contextlib.suppress(OSError):  # it has ended, as `next` will say
            self._control.send(encode(frame))

    async def next(self) -> FromServer:
        """Raises ServerEnded."""
        frame = await self._news.get()
        if frame is None:
            await self._exited()
            raise ServerEnded
        return frame

    async def _exited(self) -> None:
        """Waits for the exit code: one that ends by itself closes its socket some time before."""
        until_s = time.monotonic() + EXIT_S
        while self._process.poll() is None and time.monotonic() < until_s:
            await asyncio.sleep(0.005)

    def take_stream(self) -> socket.socket:
        """Returns the stream of the worker that `next` announced last."""
        return self._streams.pop(0)

    def stop(self) -> None:
        """Ends it and its workers. Their answers count no more, and `next` raises ServerEnded."""
        self.is_stopped = True
        self._process.kill()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended this closed server, from outside or by `stop`."""
        code = self._process.returncode
        return code is not None and ended_from_outside(code)

    def close(self) -> None:
        """May be called twice."""
        if self._control.fileno() < 0:
            return
        self.stop()
        self._process.wait()
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        for stream in self._streams:
            stream.close()

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_FRAME_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            self._news.put_nowait(None)
            return
        self._streams.extend(socket.socket(fileno=fd) for fd in fds)
        self._news.put_nowait(self._decoder.decode(data))


class WorkerStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.since_s = 0.0  # start of the current job
        self.killed_s: float | None = None  # when the server was asked to kill it
        self.ended: asyncio.Future[WorkerEnded] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self.writer.is_closing()

    def send(self, task: Task) -> None:
        if self.is_open:  # else the job is sent to another worker when this one's end is known
            self.writer.write(framed(task))


class JobWorkers:
    """A fork server, which is started again if it ends, and its workers. No job is lost with them."""

    def __init__(self, module: str, settings: ServerSettings) -> None:
        self._module, self._settings, self._limits = module, msgspec.json.encode(settings), settings.limits
        self._jobs = JobQueue(settings.limits)
        self._vocabulary: ModelVocabulary | None = None  # a server of grammar workers waits for it
        self._vocab_size = self._max_model_len = 0  # the model's; 0 until known
        self._workers: dict[int, WorkerStream] = {}  # by process id
        self._whole_s = 0.0  # when all workers were last there
        self._server = Server(module, self._settings)

    @property
    def worker_pids(self) -> list[int]:
        return list(self._workers)

    def set_model(self, vocab_size: int, max_model_len: int) -> bool:
        """Sets the model's limits for later jobs. Returns True if the size of its vocabulary changed."""
        changed = vocab_size != self._vocab_size
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        return changed

    def set_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """Tells a server of grammar workers its vocabulary. One that has another one is replaced."""
        if self._vocabulary is None:
            self._server.tell(vocabulary)
        else:
            self._server.stop()
        self._vocabulary = vocabulary

    def submit(self, peer: int, work: Work) -> None:
        self._jobs.submit(peer, work)
        self._send()

    async def load(self) -> list[str]:
        """Waits until the server has loaded, and returns its notes. Raises LoadError, ConfigError or BlockyardError."""
        loop = asyncio.get_running_loop()
        num_ends, killed_s = 0, math.inf  # when the first one was killed
        while num_ends < MAX_STARTS:
            try:
                frame = await self._server.next()
            except ServerEnded:
                was_killed, now = self._start_again("has ended before it had loaded"), loop.time()
                killed_s = min(killed_s, now) if was_killed else killed_s
                # a kill from outside says nothing about the next start
                num_ends += not was_killed or now - killed_s > KILLED_S
                continue
            if isinstance(frame, LoadFailed):
                raise (ConfigError if frame.exit_code == ConfigError.exit_code else LoadError)(frame.message)
            assert isinstance(frame, Loaded)
            return frame.notes
        raise BlockyardError(f"{self._module} ended {MAX_STARTS} times before it had loaded")

    async def run(self, on_answer: OnAnswer) -> None:
        """Calls `on_answer` with the peer and answer of each job until cancelled. Raises as `load` does."""
        try:
            while True:
                try:
                    await self._serve(on_answer)
                except* ServerEnded:
                    self._start_again("has ended")
                await self.load()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the server and its workers. May be called twice."""
        self._server.close()

    async def _serve(self, on_answer: OnAnswer) -> None:
        """Serves until the server ends."""
        server = self._server
        self._whole_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            while True:
                match await server.next():
                    case WorkerStarted(pid):
                        worker = WorkerStream(*await asyncio.open_connection(sock=server.take_stream()))
                        self._workers[pid] = worker
                        self._jobs.worker_started(pid)
                        tasks.create_task(self._one_worker(pid, worker, on_answer))
                        self._send()
                    case WorkerEnded() as end:
                        self._workers[end.pid].ended.set_result(end)

    async def _one_worker(self, pid: int, worker: WorkerStream, on_answer: OnAnswer) -> None:
        ended = WorkerEnded(0, pid, 0)  # of a worker that ends with its server: no job is to blame
        try:
            await self._read(pid, worker, on_answer)
            ended = await worker.ended
        finally:
            worker.writer.close()
            del self._workers[pid]
            now, was_stuck = asyncio.get_running_loop().time(), worker.killed_s is not None
            end = WorkerEnd(ended.exit_code, now, was_stuck, ended.growth_bytes)
            refused = self._jobs.worker_ended(pid, end, self._max_model_len)
        if refused is not None:
            job, answer = refused
            log.warning("request %s: %s", job.work.request_id, answer.message)
            on_answer(job.peer, answer)
        elif end.exit_code != 0:
            log.warning("a worker ended (%d); its jobs are given to the next one", end.exit_code)
        self._send()

    async def _read(self, pid: int, worker: WorkerStream, on_answer: OnAnswer) -> None:
        server, decoder = self._server, msgspec.msgpack.Decoder(Answer)
        try:
            while True:
                (length,) = LENGTH.unpack(await worker.reader.readexactly(LENGTH.size))
                answer = decoder.decode(await worker.reader.readexactly(length))
                if not server.is_stopped:
                    job = self._jobs.answered(pid)
                    assert answer.request_id == job.work.request_id
                    worker.since_s = asyncio.get_running_loop().time()
                    self._send()
                    on_answer(job.peer, answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            worker.writer.close()  # a write to a worker that has just ended raises BrokenPipeError here

    def _send(self) -> None:
        for pid, work in self._jobs.to_send():
            worker, current = self._workers[pid], self._jobs.current(pid)
            if current is not None and current.work is work:
                worker.since_s = asyncio.get_running_loop().time()
            worker.send(Task(self._vocab_size, self._max_model_len, work))

    async def _watch(self) -> None:
        """Kills a worker that takes too much wall-clock time for one job, and a server that does not replace it."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = asyncio.get_running_loop().time()
            most_s = self._limits.silence_s + 4 * self._limits.encoding_s(self._max_model_len)
            for pid, worker in self._workers.items():
                if worker.killed_s is None and self._jobs.current(pid) and now - worker.since_s > most_s:
                    worker.killed_s = now
                    self._server.tell(Kill(pid))
            lives = [w for w in self._workers.values() if w.is_open and (w.killed_s is None or now == w.killed_s)]
            if len(lives) == NUM_WORKERS:
                self._whole_s = now
            elif now - self._whole_s > SERVER_S:
                self._server.stop()

    def _start_again(self, what: str) -> bool:
        """Replaces a server that has ended. Returns True if it was killed."""
        if not self._server.is_stopped:
            log.warning("%s %s and is started again", self._module, what)
        self._server.close()
        was_killed = self._server.was_killed
        self._server = Server(self._module, self._settings)
        if self._vocabulary is not None:
            self._server.tell(self._vocabulary)
        return was_killed
