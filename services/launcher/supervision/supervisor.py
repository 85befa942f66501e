"""Keeps the children running, and stops them in an order that lets running requests end."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from blockyard.services.launcher.supervision.child import (
    CONFIG_EXIT_CODES,
    Child,
    MakeCommand,
    NotStarted,
    ServiceSpec,
    ending,
)
from blockyard.shared.errors import BlockyardError

log = logging.getLogger(__name__)

# Gateways first, for they finish what runs; the scheduler before those whose loss it would report; the registry
# last, for the others take leave of it.
WAVES = (("api_gateway",), ("scheduler",), ("gpu_worker", "tokenizer_pool", "detokenizer"), ("message_bus",))
STARTS_AT_MOST = 3  # of a child before the ring was ready for the first time
GRACE_S = 5.0  # beyond what a child was promised, before it is killed


class StartFailed(BlockyardError):
    """A child cannot start: the ring is given up."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """`settled` is set by whoever sees that every child is ready: from then on deaths are always answered."""

    def __init__(self, specs: Sequence[ServiceSpec], folder: Path, make_command: MakeCommand | None = None) -> None:
        self.children = [Child(spec, folder, make_command) for spec in specs]
        self.settled = False

    async def keep(self, child: Child) -> None:
        """Runs a child again and again until it is told to stop. Raises StartFailed."""
        try:
            while not child.stop_asked.is_set():
                try:
                    code = await child.run_once()
                except NotStarted as e:
                    await self._wait_to_start(child, "could not be started", str(e))
                    continue
                if not child.stop_asked.is_set():
                    await self._answer_death(child, code)
        finally:
            child.gone.set()

    async def drain(self, gateways_s: float) -> None:
        """Stops all children in waves; gateways have `gateways_s` to finish what runs."""
        for wave, children in enumerate(stop_order(self.children)):
            for child in children:
                child.stop_asked.set()
                child.send(signal.SIGTERM)
            await _wait_gone(children, (gateways_s if wave == 0 else 0.0) + GRACE_S)

    def kill(self) -> None:
        for child in self.children:
            child.stop_asked.set()
            child.send(signal.SIGKILL)

    async def _answer_death(self, child: Child, code: int) -> None:
        words = child.read_error_line()
        if not self.settled and code in CONFIG_EXIT_CODES:
            raise StartFailed(f"{child.spec.name}: {words or ending(code)}", code)
        await self._wait_to_start(child, "ended", f"{ending(code)}: {words}" if words else ending(code))

    async def _wait_to_start(self, child: Child, what: str, reason: str) -> None:
        """Waits as long as its back-off says, or until it is told to stop. Raises StartFailed."""
        name = child.spec.name
        if not self.settled and child.starts >= STARTS_AT_MOST:
            raise StartFailed(f"{name} {what} {child.starts} times before it was ready ({reason})", 1)
        delay_s = child.back_off.delay_s(child.ran_s)
        log.warning("%s %s (%s), it is started again in %.1f s", name, what, reason, delay_s)
        try:
            async with asyncio.timeout(delay_s):
                await child.stop_asked.wait()
        except TimeoutError:
            return


def stop_order(children: Sequence[Child]) -> list[list[Child]]:
    return [[child for child in children if child.spec.service in wave] for wave in WAVES]


async def _wait_gone(children: Sequence[Child], patience_s: float) -> None:
    """Kills those that are still there after `patience_s`."""
    try:
        async with asyncio.timeout(patience_s):
            for child in children:
                await child.gone.wait()
    except TimeoutError:
        for child in children:
            if not child.gone.is_set():
                log.warning("%s did not end within %.0f s of SIGTERM: killed", child.spec.name, patience_s)
                child.send(signal.SIGKILL)
    for child in children:
        await child.gone.wait()
