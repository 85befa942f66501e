"""One child process: its command and settings, start, signals, exit and restart delay."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

import blockyard
from blockyard.shared.config.resolve import Deployment, ServiceStruct
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.simulation import SimulationConfig
from blockyard.shared.process.home import home_variables

MakeCommand = Callable[[str, Path], list[str]]  # from a service's name and its settings file
CONFIG_EXIT_CODES = (2, 3)  # ConfigError and LoadError: a restart cannot help


FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
HEALTHY_S = 30.0
SIGNS_BYTES = 65536  # what a pipe holds


class BackOff:
    """Delays before restarts: 0.2 s, doubling up to 10 s, and 0.2 s again after the child ran for 30 s."""

    def __init__(self) -> None:
        self._next_s = FIRST_DELAY_S

    def delay_s(self, ran_s: float) -> float:
        """Call once for each exit, with the time the child ran."""
        if ran_s >= HEALTHY_S:
            self._next_s = FIRST_DELAY_S
        delay = self._next_s
        self._next_s = min(2 * delay, MAX_DELAY_S)
        return delay


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A process to run: the folder name of its service and its settings."""

    service: str
    config: ServiceStruct

    @property
    def name(self) -> str:
        return self.config.process.name

    @property
    def is_job(self) -> bool:
        """Whether the process ends by itself, and the ring with it."""
        return isinstance(self.config, GatewayConfig) and self.config.batch is not None


def service_specs(ring: Deployment) -> list[ServiceSpec]:
    """Returns the ring's processes, slowest start first: all start at once, and the first ones get the cores."""
    return [
        *(ServiceSpec("gpu_worker", config) for config in ring.workers),
        ServiceSpec("message_bus", ring.registry),
        *(ServiceSpec("tokenizer_pool", config) for config in ring.tokenizers),
        ServiceSpec("scheduler", ring.scheduler),
        *(ServiceSpec("detokenizer", config) for config in ring.detokenizers),
        *(ServiceSpec("api_gateway", config) for config in ring.gateways),
    ]


class NotStarted(Exception):
    """The system refused to start a process (memory, process or file limits, a full disk). A retry may succeed."""


class Child:
    """A process that `run_once` starts, any number of times, until `stop` is called."""

    def __init__(self, spec: ServiceSpec, folder: Path, make_command: MakeCommand | None = None) -> None:
        self.spec = spec
        self._command = make_command or command
        self.starts = 0  # number of starts so far
        self.stop_asked = asyncio.Event()  # it is not restarted after its exit
        self.was_ready = False  # the ring: a start is a restart from then on
        self.gone = asyncio.Event()  # it has exited and is not restarted
        self._back_off = BackOff()
        self._ran_s = 0.0  # duration of the last run
        self._process: asyncio.subprocess.Process | None = None
        self._signs: int | None = None  # the end for reading of the process's pipe
        self._settings = folder / f"{spec.name.replace(' ', '-')}.json"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run_once(self) -> int:
        """Starts the process and waits for its exit. Returns the exit code, or minus the signal that killed it.

        Raises NotStarted.
        """
        self.starts += 1
        self._ran_s = 0.0
        began = time.monotonic()
        try:
            self._process = process = await self._start()
            try:
                return await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                self._process = None
                self._ran_s = time.monotonic() - began
        finally:
            self._close_signs()

    async def _start(self) -> asyncio.subprocess.Process:
        writing: int | None = None
        try:
            self._signs, writing = os.pipe()
            os.set_blocking(self._signs, False)
            self._write_settings(writing)
            # a new session: Ctrl-C in the terminal reaches only the launcher, which then drains
            return await asyncio.create_subprocess_exec(
                *self._command(self.spec.service, self._settings),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,
                pass_fds=(writing,),
            )
        except OSError as e:
            raise NotStarted(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}") from e
        finally:
            if writing is not None:
                os.close(writing)

    def read_signs(self) -> bytes:
        """Returns the signs of life that arrived since the last call."""
        try:
            return b"" if self._signs is None else os.read(self._signs, SIGNS_BYTES)
        except BlockingIOError:
            return b""

    def _close_signs(self) -> None:
        if self._signs is not None:
            os.close(self._signs)
            self._signs = None

    def stop(self, number: signal.Signals) -> None:
        """Sends the signal and prevents further restarts."""
        self.stop_asked.set()
        self.send(number)

    def restart_delay_s(self) -> float:
        """Returns how long to wait before the next start. Call once for each exit."""
        return self._back_off.delay_s(self._ran_s)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def read_error_line(self) -> str:
        """Returns the error line that the process wrote before it exited, or an empty string."""
        path = self._settings.with_suffix(".error")
        try:
            text = path.read_text("utf-8")
            path.unlink()
        except OSError:
            return ""
        return " ".join(text.split())

    def _write_settings(self, liveness_fd: int) -> None:
        process = msgspec.structs.replace(
            self.spec.config.process, parent_pid=os.getpid(), liveness_fd=liveness_fd, is_restart=self.was_ready
        )
        config = msgspec.structs.replace(self.spec.config, process=process)
        fd = os.open(self._settings, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(config))


def command(service: str, settings: Path) -> list[str]:
    """-P keeps the current folder off the module path."""
    return [sys.executable, "-P", "-m", f"blockyard.services.{service}", str(settings)]


def exec_service(service: str, config: ServiceStruct | SimulationConfig) -> NoReturn:
    """Replaces this process with the service's. Its settings go into no file, since they may hold API keys."""
    fd = os.memfd_create("settings", 0)
    os.write(fd, msgspec.json.encode(config))
    words = command(service, Path(f"/proc/self/fd/{fd}"))
    sys.stdout.flush()
    os.execve(words[0], words, environment())


def environment() -> dict[str, str]:
    """Returns the environment of children, which import the package from where this process imported it."""
    place, environ = str(Path(blockyard.__file__).parent.parent), os.environ | home_variables()
    if Path(place).name in ("site-packages", "dist-packages"):
        return environ
    paths = [place, *(path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != place)]
    return environ | {"PYTHONPATH": os.pathsep.join(paths)}


def ending(code: int) -> str:
    """Describes an exit code."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
