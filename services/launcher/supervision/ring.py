"""Runs a whole ring as child processes of this one, from the first start to the last exit."""

import asyncio
import signal
from pathlib import Path

from blockyard.services.launcher.supervision.child import MakeCommand, service_specs
from blockyard.services.launcher.supervision.hung import HungDetector
from blockyard.services.launcher.supervision.run_dir import MemberSockets
from blockyard.services.launcher.supervision.start_up import StartupDisplay, StartupTracker
from blockyard.services.launcher.supervision.supervisor import StartFailed, Supervisor, kill_hung
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.member_list import Changed, Gone, Joined
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import Hello, Role


def local_bus(folder: Path) -> BusConfig:
    """Returns the bus settings of a ring with its sockets in one private folder."""
    return BusConfig(registry=f"ipc://{folder}/message-bus", bind=f"ipc://{folder}")


class Ring:
    """Runs a deployment's processes. `ready` is set when every service is ready.

    Its methods are called on the event loop that `run` runs in.
    """

    def __init__(
        self, deployment: Deployment, folder: Path, display: StartupDisplay, make_command: MakeCommand | None = None
    ) -> None:
        self._deployment = deployment
        all_specs = service_specs(deployment)
        self.supervisor = Supervisor(all_specs, folder, make_command)
        workers = [spec.name for spec in all_specs if spec.service == "gpu_worker"]
        self._hung = HungDetector(deployment.hung_timeout_s, long_turns=workers)
        self._sockets = MemberSockets(folder)
        self._names = {spec.name for spec in all_specs}
        self.start_up = StartupTracker([spec.name for spec in all_specs], display)
        self.ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends `run` after running requests were drained."""
        self._stop.set()

    def reload_keys(self) -> None:
        """Has the gateways read their key files again."""
        self.supervisor.signal_gateways(signal.SIGHUP)

    def kill(self) -> None:
        """Kills all processes instead of draining."""
        self._kill.set()

    async def run(self, drain_s: float) -> None:
        """Runs until `stop` or the end of a job, then lets running requests finish for `drain_s`.

        Raises StartFailed.
        """
        links: Links[Hello] = Links("launcher", Role.LAUNCHER, self._deployment.registry.process.bus, Hello)
        try:
            with links:
                async with asyncio.TaskGroup() as tasks:
                    for child in self.supervisor.children:
                        tasks.create_task(self.supervisor.supervise(child))
                    work = (
                        self._watch(links),
                        self._kill_when_asked(),
                        kill_hung(self.supervisor, self._hung),
                        self._stop_after_job(),
                    )
                    helpers = [tasks.create_task(coroutine) for coroutine in work]
                    await self._stop.wait()
                    await self.supervisor.drain(drain_s)
                    for helper in helpers:
                        helper.cancel()
        except ExceptionGroup as group:
            failed, _ = group.split(StartFailed)
            if failed is None:
                raise
            raise _first(failed) from None

    async def _watch(self, links: Links[Hello]) -> None:
        links.update(ready=True, phase="ready")
        async for _, event in links:
            match event:
                case Joined(member) | Changed(member):
                    if member.name in self._names:
                        self._sockets.on_member(member)
                    if self.start_up.on_member(member):
                        self.supervisor.settle()
                        self.ready.set()
                case Gone(member):
                    self.start_up.on_gone(member)

    async def _stop_after_job(self) -> None:
        await self.supervisor.job_ended.wait()
        self.stop()

    async def _kill_when_asked(self) -> None:
        await self._kill.wait()
        self.supervisor.kill()


def _first(group: ExceptionGroup[StartFailed]) -> StartFailed:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, ExceptionGroup) else inner
