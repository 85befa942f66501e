"""`blockyard serve`: runs the whole ring on this machine."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

import msgspec
from setproctitle import setproctitle

from blockyard.services.launcher import executors, ports, sources
from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.supervision.child import service_specs
from blockyard.services.launcher.supervision.ring import Ring, local_bus
from blockyard.services.launcher.supervision.run_dir import RunDir
from blockyard.services.launcher.supervision.start_up import PlainDisplay, StartupDisplay, StartupProgressBars
from blockyard.shared.config.parsed_flags import ParsedFlag, Values
from blockyard.shared.config.resolve import Deployment, resolve
from blockyard.shared.config.server import log_settings
from blockyard.shared.errors import ConfigError
from blockyard.shared.process import logs

RUN_ONLY = ("message-bus", "bind", "advertise", "curve-keys", "name", "role")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
KEY_FILES = ("api-key-file", "admin-key-file")


def main(args: Sequence[str]) -> int:
    """Serves until SIGTERM and returns the exit code. Raises BlockyardError if the ring does not start."""
    values, notes = read_values(args)
    for name in RUN_ONLY:
        if values.is_given(name):
            raise ConfigError(f"{values.where(name)}: is for `blockyard run`; serve starts its own ring")
    with RunDir(values.maybe("run-dir", str)) as run_dir, contextlib.ExitStack() as reserved:
        deployment = resolve(values, model_files.find(values), local_bus(run_dir.path))
        reserved.enter_context(ports.reserved(deployment.gateways))
        workers = executors.choose(deployment.workers, values, os.environ)
        deployment = msgspec.structs.replace(deployment, workers=workers)
        setproctitle("blockyard: launcher")
        logs.setup("launcher", log_settings.log_level(values), log_settings.config_file(values))
        display = make_display(deployment, sys.stdout, values.get("use-tqdm-on-load", bool))
        for note in (*notes, *deployment.notes):
            display.say(note)
        ring = Ring(deployment, run_dir.path, display)
        asyncio.run(run_ring(ring, display, values, _ready_line(deployment)))
    return 0


def read_values(args: Sequence[str]) -> tuple[Values, list[str]]:
    """Returns the flags and notes of `serve`; MODEL may be positional. Raises ConfigError."""
    values, positionals, notes = sources.read(args, os.environ)
    if len(positionals) > 1:
        raise ConfigError(f"expected one model, got {' '.join(positionals)}")
    if positionals:
        values = sources.with_model(values, positionals[0])
    elif not values.is_given("model") and values["worker-cls"] == "mock":
        values = values.with_given(
            {"model": ParsedFlag(model_files.DEMO, "model")}
        )  # the mock needs any tokenizer; the demo's needs no network
    return values, notes


def make_display(deployment: Deployment, out: TextIO, shows_bars: bool = True) -> StartupDisplay:
    """Progress bars on a terminal, lines elsewhere and without `shows_bars`."""
    if not (shows_bars and out.isatty()):
        return PlainDisplay(out)
    return StartupProgressBars([spec.name for spec in service_specs(deployment)], out)


async def run_ring(ring: Ring, display: StartupDisplay, values: Values, ready_line: str) -> None:
    """Runs a ring until a signal, or the end of its job. Shows `ready_line` once it is ready. Raises StartFailed."""
    drain_s = values.get("shutdown-timeout", float)

    def on_signal() -> None:
        if ring.is_stopping:
            display.say("stopping at once")
            ring.kill()
        else:
            display.close()
            display.say(f"stopping: running requests have {drain_s:g} s to finish; a second signal ends them now")
            ring.stop()

    had_terminal = _has_terminal()

    def on_hangup() -> None:
        """Without key files, or if the terminal was closed, the ring stops, as a process without a handler would."""
        if ring.is_stopping or not any(map(values.is_given, KEY_FILES)) or (had_terminal and not _has_terminal()):
            on_signal()
        else:
            ring.reload_keys()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        async with asyncio.TaskGroup() as tasks:
            announcer = tasks.create_task(_announce(ring, display, ready_line))
            await ring.run(drain_s)
            announcer.cancel()
        display.say("stopped")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        display.close()


async def _announce(ring: Ring, display: StartupDisplay, ready_line: str) -> None:
    await ring.ready.wait()
    display.close()
    display.say(f"{ready_line} after {ring.start_up.seconds:.1f} s")


def _ready_line(deployment: Deployment) -> str:
    """The model's names and URL."""
    gateway = deployment.gateways[0]
    return f"{', '.join(gateway.served_model_names)} is served at {ports.url(gateway)}"


def _has_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
