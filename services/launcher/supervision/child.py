"""One child process: how it is started, what became of it."""

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
from blockyard.services.launcher.supervision.backoff import BackOff
from blockyard.shared.config.resolve import Deployment, ServiceStruct
from blockyard.shared.config.simulation import SimulationConfig

MakeCommand = Callable[[str, Path], list[str]]  # of a service's name and its settings file
CONFIG_EXIT_CODES = (2, 3)  # ConfigError and LoadError: starting again cannot help


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A process to be had: the folder name of its service and its settings."""

    service: str
    config: ServiceStruct

    @property
    def name(self) -> str:
        return self.config.process.name


def service_specs(ring: Deployment) -> list[ServiceSpec]:
    """In starting order: all start at once, but who takes longest gets the cores first."""
    return [
        *(ServiceSpec("gpu_worker", config) for config in ring.workers),
        ServiceSpec("message_bus", ring.registry),
        *(ServiceSpec("tokenizer_pool", config) for config in ring.tokenizers),
        ServiceSpec("scheduler", ring.scheduler),
        *(ServiceSpec("detokenizer", config) for config in ring.detokenizers),
        *(ServiceSpec("api_gateway", config) for config in ring.gateways),
    ]


class NotStarted(Exception):
    """The system did not start a process: no memory, no process or file left, a full disk. It may the next time."""


class Child:
    """`starts` counts; `stop_asked` is set once it shall not be started again."""

    def __init__(self, spec: ServiceSpec, folder: Path, make_command: MakeCommand | None = None) -> None:
        self.spec = spec
        self._command = make_command or command
        self.starts = 0
        self.ran_s = 0.0  # the last time
        self.back_off = BackOff()
        self.stop_asked = asyncio.Event()
        self.gone = asyncio.Event()  # and will not come back
        self._process: asyncio.subprocess.Process | None = None
        self._settings = folder / f"{spec.name.replace(' ', '-')}.json"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run_once(self) -> int:
        """Starts the process and waits for its end: the exit code, or minus the signal that killed it.

        Raises NotStarted.
        """
        self.starts += 1
        self.ran_s = 0.0
        began = time.monotonic()
        self._process = process = await self._start()
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._process = None
            self.ran_s = time.monotonic() - began

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            self._write_settings()
            # a session of its own: Ctrl-C in the terminal reaches the launcher alone, which then drains
            return await asyncio.create_subprocess_exec(
                *self._command(self.spec.service, self._settings),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,
            )
        except OSError as e:
            raise NotStarted(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}") from e

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def read_error_line(self) -> str:
        """The one line that a process leaves which ends with an error of ours, or an empty string."""
        path = self._settings.with_suffix(".error")
        try:
            text = path.read_text("utf-8")
            path.unlink()
        except OSError:
            return ""
        return " ".join(text.split())

    def _write_settings(self) -> None:
        process = msgspec.structs.replace(self.spec.config.process, parent_pid=os.getpid())
        config = msgspec.structs.replace(self.spec.config, process=process)
        fd = os.open(self._settings, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(config))


def command(service: str, settings: Path) -> list[str]:
    """-P: the folder a user happens to be in stays off the module path."""
    return [sys.executable, "-P", "-m", f"blockyard.services.{service}", str(settings)]


def exec_service(service: str, config: ServiceStruct | SimulationConfig) -> NoReturn:
    """Replaces this process with the service's. Its settings go into no file, since they may hold API keys."""
    fd = os.memfd_create("settings", 0)
    os.write(fd, msgspec.json.encode(config))
    words = command(service, Path(f"/proc/self/fd/{fd}"))
    sys.stdout.flush()
    os.execve(words[0], words, environment())


def environment() -> dict[str, str]:
    """The children's: they find the package where this process found it, installed or not."""
    home = str(Path(blockyard.__file__).parent.parent)
    if Path(home).name in ("site-packages", "dist-packages"):
        return dict(os.environ)
    paths = [home, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != home)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
