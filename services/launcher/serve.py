"""`blockyard serve`: the whole ring on this machine."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from setproctitle import setproctitle

from blockyard.services.launcher import gpus, ports, sources
from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.supervision.child import service_specs
from blockyard.services.launcher.supervision.ring import Ring, local_bus
from blockyard.services.launcher.supervision.run_dir import RunDir
from blockyard.services.launcher.supervision.start_up import PlainDisplay, StartupDisplay
from blockyard.shared import logs
from blockyard.shared.config.given import Given, GivenFlags, Values
from blockyard.shared.config.resolve import Deployment, resolve
from blockyard.shared.errors import ConfigError

RUN_ONLY = ("message-bus", "bind", "advertise", "curve-keys", "name")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(args: Sequence[str]) -> int:
    """Serves until SIGTERM; returns the exit code. Raises BlockyardError if the ring does not start."""
    values, notes = read_values(args)
    for name in RUN_ONLY:
        if values.is_given(name):
            raise ConfigError(f"{values.where(name)}: is for `blockyard run`; serve makes a ring of its own")
    with RunDir(values.maybe("run-dir", str)) as run_dir, contextlib.ExitStack() as ports_held:
        deployment = resolve(values, model_files.find(values), local_bus(run_dir.path))
        ports_held.enter_context(ports.held(deployment.gateways))
        gpus.check(deployment.workers, os.environ)
        setproctitle("blockyard: launcher")
        logs.setup("launcher", values.get("log-level", str))
        display = make_display(deployment, sys.stdout)
        for note in (*notes, *deployment.notes):
            display.say(note)
        ring = Ring(deployment, run_dir.path, display)
        asyncio.run(_serve(ring, display, deployment, values))
    return 0


def read_values(args: Sequence[str]) -> tuple[Values, list[str]]:
    """The flags and notes of `serve`, where MODEL may stand without --model. Raises ConfigError."""
    values, positionals, notes = sources.read(args, os.environ)
    if len(positionals) > 1:
        raise ConfigError(f"expected one model, got {' '.join(positionals)}")
    if positionals and values.is_given("model") and values["model"] != positionals[0]:
        raise ConfigError(f"model {positionals[0]} and {values.where('model')} {values['model']}: which one?")
    model: GivenFlags = {"model": Given(positionals[0], "model")} if positionals else {}
    if not positionals and not values.is_given("model") and values["worker-cls"] == "mock":
        model = {"model": Given(model_files.DEMO, "model")}  # any tokenizer will do, this one needs no network
    return values.with_given(model), notes


def make_display(deployment: Deployment, out: TextIO) -> StartupDisplay:
    """Progress bars on a terminal, lines elsewhere."""
    if not out.isatty():
        return PlainDisplay(out)
    # rich takes 0.1 s to import: only terminals need it
    from blockyard.services.launcher.supervision.progress import startup_progress_bars  # noqa: PLC0415

    return startup_progress_bars(out, [spec.name for spec in service_specs(deployment)])


async def _serve(ring: Ring, display: StartupDisplay, deployment: Deployment, values: Values) -> None:
    drain_s = values.get("shutdown-timeout", float)

    def on_signal() -> None:
        if ring.stop.is_set():
            display.say("stopping at once")
            ring.kill.set()
        else:
            display.close()
            display.say(f"stopping: running requests have {drain_s:g} s to end; a second signal ends them now")
            ring.stop.set()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        async with asyncio.TaskGroup() as tasks:
            greeter = tasks.create_task(_greet(ring, display, deployment))
            await ring.run(drain_s)
            greeter.cancel()
        display.say("stopped")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        display.close()


async def _greet(ring: Ring, display: StartupDisplay, deployment: Deployment) -> None:
    """The one line that says that it is done, and where."""
    await ring.ready.wait()
    display.close()
    gateway = deployment.gateways[0]
    served = ", ".join(gateway.served_model_names)
    display.say(f"{served} is served at {ports.url(gateway)} after {ring.start_up.seconds:.1f} s")
