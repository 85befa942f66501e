"""The start of a service process: its settings file, process title and logging, and its end with the launcher."""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import msgspec
from setproctitle import setproctitle

from blockyard.shared.config.services.process import ProcessConfig
from blockyard.shared.errors import BlockyardError, ConfigError
from blockyard.shared.process import logs, open_files

LOW_PRIORITY = 10
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


class ServiceConfig(Protocol):
    @property
    def process(self) -> ProcessConfig: ...


C = TypeVar("C", bound=ServiceConfig)


def load(config_type: type[C]) -> C:
    """Returns the settings in the file that argv[1] names. Raises ConfigError.

    Also sets the process title and logging, raises the limit on open files, and ties this process's life to the
    launcher's.
    """
    if len(sys.argv) != 2:
        raise ConfigError("expected one argument, the settings file; `blockyard run SERVICE` writes it")
    config = read(Path(sys.argv[1]), config_type)
    setproctitle(f"blockyard: {config.process.name}")
    logs.setup(config.process.name, config.process.log_level, config.process.log_config_file)
    open_files.raise_limit()
    if config.process.parent_pid:
        die_with(config.process.parent_pid)
    return config


def read(path: Path, config_type: type[C]) -> C:
    """Decodes a settings file. Raises ConfigError for a missing, unknown or out-of-range field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=config_type)
    except OSError as e:
        raise ConfigError(f"settings file {path}: {e.strerror}") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"settings file {path}: {e}") from e


def run(config_type: type[C], serve: Callable[[C], None]) -> int:
    """The whole life of a service process: loads settings, serves, returns the exit code.

    A BlockyardError is reported in one line: in a file beside the settings file for the launcher
    (`scheduler.json` -> `scheduler.error`), or on stderr if there is no launcher.
    """
    config: C | None = None
    try:
        config = load(config_type)
        serve(config)
    except BlockyardError as e:
        report_error(None if config is None else config.process, e)
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def report_error(process: ProcessConfig | None, error: BlockyardError) -> None:
    """Writes the one line of an error where `run` does. process: None if the settings are not read yet."""
    if process is not None and process.parent_pid:
        Path(sys.argv[1]).with_suffix(".error").write_text(str(error), "utf-8")
    else:
        print(f"error: {error}", file=sys.stderr)


def end(code: int) -> NoReturn:
    """Ends this process without the interpreter's clean-up, in which Triton's bindings list all objects still alive.

    They would be printed behind the one line of a refused start. `serve` has closed everything that has to be closed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def loading_modules() -> Iterator[None]:
    """Collects no garbage in this block, nor looks for any in what it made: modules stay.

    Otherwise collections, each of which visits all objects so far, take a fifth of the time in which torch is imported.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def wake_on_time() -> None:
    """Timers of this thread, and of threads that it starts, end within a microsecond; the default is 50 of them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1000)  # ns


def give_way() -> None:
    """Gives this process and its children a tenth of the CPU time of others that want the same core.

    For work on what clients sent, before any of it was admitted: open streams go first. To be called in a session of
    its own: Linux may share a core among sessions first, and the priority of a process then counts within its own.
    """
    os.nice(LOW_PRIORITY)
    with contextlib.suppress(OSError):  # a kernel without groups by session has no such file
        Path("/proc/self/autogroup").write_text(str(LOW_PRIORITY))


def die_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent ends for any reason.

    A parent that ended during our start is no error: a start that is refused ends others that are still starting.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        logging.getLogger(__name__).debug("the parent process %d is gone", parent_pid)
        os._exit(1)
