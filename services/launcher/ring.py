"""A whole ring as child processes of this one, from the first start to the last exit."""

import asyncio
from pathlib import Path

from blockyard.services.launcher.child import MakeCommand, specs
from blockyard.services.launcher.start_up import Display, StartUp
from blockyard.services.launcher.supervisor import StartFailed, Supervisor
from blockyard.shared.bus import Changed, Gone, Joined, Links
from blockyard.shared.config.process import BusConfig
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.messages import Hello, Role


def local_bus(folder: Path) -> BusConfig:
    """The bus of a ring that lives in one private folder."""
    return BusConfig(registry=f"ipc://{folder}/message-bus", bind=f"ipc://{folder}")


class Ring:
    """Runs a deployment. `ready` is set when every service is; `stop` and then `kill` are asked for from outside.

    All events belong to the loop that `run` runs in.
    """

    def __init__(
        self, deployment: Deployment, folder: Path, display: Display, make_command: MakeCommand | None = None
    ) -> None:
        self._deployment = deployment
        self._display = display
        all_specs = specs(deployment)
        self.supervisor = Supervisor(all_specs, folder, make_command)
        self.start_up = StartUp([spec.name for spec in all_specs], display)
        self.ready = asyncio.Event()
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()

    async def run(self, drain_s: float) -> None:
        """Until `stop`: then drains, giving running requests `drain_s`. Raises StartFailed."""
        links: Links[Hello] = Links("launcher", Role.LAUNCHER, self._deployment.registry.process.bus, Hello)
        try:
            with links:
                async with asyncio.TaskGroup() as tasks:
                    for child in self.supervisor.children:
                        tasks.create_task(self.supervisor.keep(child))
                    helpers = [tasks.create_task(self._watch(links)), tasks.create_task(self._kill_on_demand())]
                    await self.stop.wait()
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
                    if self.start_up.saw(member):
                        self.supervisor.settled = True
                        self.ready.set()
                case Gone(member):
                    self.start_up.lost(member)

    async def _kill_on_demand(self) -> None:
        await self.kill.wait()
        self.supervisor.kill()


def _first(group: ExceptionGroup[StartFailed]) -> StartFailed:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, ExceptionGroup) else inner
