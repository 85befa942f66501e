"""A fork server: a process that loads once what its workers need, and forks them.

A worker is a forked process that answers one job after the other, and may be killed. It is replaced in milliseconds,
with everything loaded in memory that it shares with the others. The server itself runs nothing that a client sent. The
service starts it as a process of its own (`run`), and again if it ends.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import msgspec
from setproctitle import setproctitle

from blockyard.services.tokenizer_pool.workers.job_limits import NUM_WORKERS, JobLimits, resident_bytes
from blockyard.services.tokenizer_pool.workers.worker_frames import (
    MAX_FRAME_BYTES,
    FromServer,
    Kill,
    Loaded,
    LoadFailed,
    WorkerEnded,
    WorkerStarted,
    encode,
    pair,
)
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import GrammarEngine
from blockyard.shared.process import logs, settings

log = logging.getLogger(__name__)

PAUSE_S = 0.05  # before the next worker, in case one ends right after its start


class Workload(Protocol):
    """The work of a fork server's workers, loaded once by the server."""

    notes: list[str]  # describe the loaded files

    def serve(self, sock: socket.socket) -> None:
        """The life of a worker: answers jobs on the stream."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the service writes to the stdin of a fork server."""

    config: TokenizerConfig
    limits: JobLimits
    engine: GrammarEngine = GrammarEngine.AUTO  # of grammar workers
    gives_way: bool = False  # loads at low priority: nothing waits for it


def run(kind: str, load: Callable[[ServerSettings, socket.socket], Workload]) -> None:
    """The whole life of a fork server. argv[1] is the descriptor of its control socket; `kind` is part of its title."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the exit status tells it from an error of a job
    control = socket.socket(fileno=int(sys.argv[1]))
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerSettings)
    settings.die_with(os.getppid())
    if given.gives_way:
        settings.give_way()
    name = f"{given.config.process.name}: {kind}"
    logs.setup(name, given.config.process.log_level, given.config.process.log_config_file)
    setproctitle(f"blockyard: {name} fork server")
    ForkServer(control, name, lambda: load(given, control)).run()


@dataclass(frozen=True, slots=True)
class _Forked:
    pid: int
    began_s: float
    resident_bytes: int  # of the server then


class ForkServer:
    """Runs until the service closes the control socket."""

    def __init__(self, control: socket.socket, name: str, load: Callable[[], Workload]) -> None:
        self._control, self._name, self._load = control, name, load
        self._workers: dict[int, _Forked] = {}  # by a descriptor that the kernel closes when the worker ends

    def run(self) -> None:
        # without its service this process ends, and the workers with it
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                workload = self._load()
            except BlockyardError as e:
                self._tell(LoadFailed(e.exit_code, str(e)))
                return
            gc.collect()
            gc.freeze()  # a garbage collection would copy pages shared with workers
            self._tell(Loaded(workload.notes))
            while self._serve(workload):
                pass

    def _serve(self, workload: Workload) -> bool:
        """Starts missing workers and waits for an event. Returns False once the service is gone."""
        while len(self._workers) < NUM_WORKERS:
            self._start(workload)
        ready, _, _ = select.select([*self._workers, self._control.fileno()], [], [])
        for alive in self._workers.keys() & ready:
            self._end(alive)
        if self._control.fileno() not in ready:
            return True
        data = self._control.recv(MAX_FRAME_BYTES)
        if data:
            pid = msgspec.msgpack.decode(data, type=Kill).pid
            if any(worker.pid == pid for worker in self._workers.values()):  # not reaped yet: the pid is valid
                os.kill(pid, signal.SIGKILL)
        return bool(data)

    def _start(self, workload: Workload) -> None:
        ours, theirs = pair(socket.SOCK_STREAM)
        alive, held = os.pipe()
        parent, began, rss = os.getpid(), time.monotonic(), resident_bytes()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            ours.close()
            for inherited in (alive, *self._workers):
                os.close(inherited)
            _run_worker(parent, f"{self._name} worker", lambda: workload.serve(theirs))
        theirs.close()
        os.close(held)
        self._workers[alive] = _Forked(pid, began, rss)
        with ours:
            socket.send_fds(self._control, [encode(WorkerStarted(pid))], [ours.fileno()])

    def _end(self, alive: int) -> None:
        worker = self._workers.pop(alive)
        os.close(alive)
        _, status, used = os.wait4(worker.pid, 0)
        growth = max(used.ru_maxrss * 1024 - worker.resident_bytes, 0)
        self._tell(WorkerEnded(os.waitstatus_to_exitcode(status), worker.pid, growth))
        if time.monotonic() - worker.began_s < PAUSE_S:
            time.sleep(PAUSE_S)

    def _tell(self, frame: FromServer) -> None:
        self._control.send(encode(frame))


def _run_worker(parent: int, name: str, work: Callable[[], None]) -> NoReturn:
    """Runs `work` as the whole life of a forked process, which ends with its parent."""
    code = 1
    try:
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
