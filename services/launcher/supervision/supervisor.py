"""Restarts children that exit, and stops them in an order that lets running requests finish."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from blockyard.services.launcher.supervision.child import (
    CONFIG_EXIT_CODES,
    Child,
    MakeCommand,
    NotStarted,
    ServiceSpec,
    ending,
)
from blockyard.services.launcher.supervision.hung import HungDetector
from blockyard.shared.errors import BatchError, BlockyardError
from blockyard.shared.process.awake_clock import AwakeClock

log = logging.getLogger(__name__)

# Gateways first: they finish the running requests. The scheduler before the services that it watches. The registry
# last: the others deregister.
WAVES = (("api_gateway",), ("scheduler",), ("gpu_worker", "tokenizer_pool", "detokenizer"), ("message_bus",))
MAX_STARTS = 3  # of a child before the ring is ready for the first time
JOB_EXIT_CODES = (0, BatchError.exit_code)  # after others a job is started again and goes on
HUNG_CHECK_S = 0.5
GRACE_S = 5.0  # added to the time a child has to stop before it is killed


class StartFailed(BlockyardError):
    """A child cannot start, so the ring ends."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """Runs one task per child. After `settle`, called once all are ready, every exit leads to a restart.

    A job is not started again when it is done or has failed for good.
    """

    def __init__(self, specs: Sequence[ServiceSpec], folder: Path, make_command: MakeCommand | None = None) -> None:
        self.children = [Child(spec, folder, make_command) for spec in specs]
        self.settled = False
        self.job_ended = asyncio.Event()  # the child that is a job has done its work, or failed for good
        self.job_error = ""  # why it failed

    def settle(self) -> None:
        self.settled = True
        for child in self.children:
            child.was_ready = True

    async def supervise(self, child: Child) -> None:
        """Runs a child and restarts it until it is stopped. Raises StartFailed."""
        try:
            while not child.stop_asked.is_set():
                try:
                    code = await child.run_once()
                except NotStarted as e:
                    await self._wait_before_restart(child, "could not be started", str(e))
                    continue
                if child.stop_asked.is_set():
                    return
                if child.spec.is_job and code in JOB_EXIT_CODES:
                    self.job_error = child.read_error_line() if code else ""
                    self.job_ended.set()
                    return
                await self._on_exit(child, code)
        finally:
            child.gone.set()

    async def drain(self, gateways_s: float) -> None:
        """Stops all children in waves; gateways have `gateways_s` to finish running requests."""
        for wave, children in enumerate(stop_order(self.children)):
            for child in children:
                child.stop(signal.SIGTERM)
            await _wait_gone(children, (gateways_s if wave == 0 else 0.0) + GRACE_S)

    def signal_gateways(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.spec.service == "api_gateway" and not child.spec.is_job:
                child.send(number)

    def kill(self) -> None:
        for child in self.children:
            child.stop(signal.SIGKILL)

    async def _on_exit(self, child: Child, code: int) -> None:
        words = child.read_error_line()
        if not self.settled and code in CONFIG_EXIT_CODES:
            raise StartFailed(f"{child.spec.name}: {words or ending(code)}", code)
        await self._wait_before_restart(child, "ended", f"{ending(code)}: {words}" if words else ending(code))

    async def _wait_before_restart(self, child: Child, what: str, reason: str) -> None:
        """Waits for the back-off delay or until the child is stopped. Raises StartFailed."""
        name = child.spec.name
        if not self.settled and child.starts >= MAX_STARTS:
            raise StartFailed(f"{name} {what} {child.starts} times before it was ready ({reason})", 1)
        delay_s = child.restart_delay_s()
        log.warning("%s %s (%s), it is started again in %.1f s", name, what, reason, delay_s)
        try:
            async with asyncio.timeout(delay_s):
                await child.stop_asked.wait()
        except TimeoutError:
            return


async def kill_hung(
    supervisor: Supervisor, hung: HungDetector, on_signs: Callable[[bytes], None] = lambda signs: None
) -> None:
    """Kills hung children for ever; the supervisor restarts them. on_signs: gets all signs of life."""
    clock = AwakeClock(2 * HUNG_CHECK_S)
    while True:
        await asyncio.sleep(HUNG_CHECK_S)
        now = clock.now()
        children = {child.spec.name: child for child in supervisor.children}
        for name, child in children.items():
            if child.pid is None or child.stop_asked.is_set():
                hung.on_ended(name)
            else:
                signs = child.read_signs()
                on_signs(signs)
                hung.on_running(name, child.starts, signs, now)
        for name, silent_s in hung.find_hung(now, supervisor.settled).items():
            log.warning("%s is hung: no sign of life for %.0f s (--hung-timeout), it is killed", name, silent_s)
            children[name].send(signal.SIGKILL)


def stop_order(children: Sequence[Child]) -> list[list[Child]]:
    return [[child for child in children if child.spec.service in wave] for wave in WAVES]


async def _wait_gone(children: Sequence[Child], timeout_s: float) -> None:
    """Waits `timeout_s`, then kills the children that still run."""
    try:
        async with asyncio.timeout(timeout_s):
            for child in children:
                await child.gone.wait()
    except TimeoutError:
        for child in children:
            if not child.gone.is_set():
                log.warning("%s did not end within %.0f s of SIGTERM: killed", child.spec.name, timeout_s)
                child.send(signal.SIGKILL)
    for child in children:
        await child.gone.wait()
