"""A ring of real processes over tcp, with all links through proxies: a link is cut while both its ends live."""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rig import ROOT, Server, wait_ready

from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.supervision.child import service_specs
from blockyard.services.message_bus.service import Membership, Registry
from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.resolve import Deployment, resolve
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import Members

HOST = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST, and data in flight is lost
READ_BYTES = 65536


class Proxy:
    """Forwards connections to one member. Its methods are called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: str) -> None:
        self._loop, self._port = loop, int(target.rpartition(":")[2])
        self._connections: set[asyncio.Task[None]] = set()
        self._refuse_until = 0.0
        self._swallows = False
        listener = socket.create_server((HOST, 0))
        self.endpoint = f"tcp://{HOST}:{listener.getsockname()[1]}"
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._forward, sock=listener), loop)
        self._server = starting.result()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def cut(self, refuse_s: float = 0.0) -> None:
        """Resets all connections; new ones are reset too for so long."""
        asyncio.run_coroutine_threadsafe(self._cut(refuse_s), self._loop).result()

    def swallow(self) -> None:
        """Forwards nothing until the next cut: what is sent meanwhile is lost."""
        self._swallows = True

    def close(self) -> None:
        """Before its loop is stopped."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        self._server.close()
        connections = list(self._connections)
        await self._cut(0.0)
        await asyncio.gather(*connections, return_exceptions=True)

    async def _cut(self, refuse_s: float) -> None:
        self._refuse_until = time.monotonic() + refuse_s
        for task in list(self._connections):
            task.cancel()
        self._swallows = False

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        ends = [writer]
        try:
            if time.monotonic() >= self._refuse_until:
                back, there = await asyncio.open_connection(HOST, self._port)
                ends.append(there)
                copies = [asyncio.create_task(self._copy(*ways)) for ways in ((reader, there), (back, writer))]
                try:
                    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for copy in copies:
                        copy.cancel()
        except (OSError, asyncio.CancelledError):
            pass  # both ends apply it below
        finally:
            self._connections.discard(task)
            for end in ends:
                with contextlib.suppress(OSError):  # closed by its own end
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if not self._swallows:
                    writer.write(data)
                    await writer.drain()


class ProxiedRegistry(RegistrySocket):
    """Announces each member at the address of its proxy."""

    def __init__(self, bus: BusConfig, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bus)
        self._loop = loop
        self.proxies: dict[str, Proxy] = {}  # by endpoint
        self.names: dict[str, Proxy] = {}  # by name of the newest member

    def push(self, news: Members) -> None:
        members = []
        for member in news.members:
            if member.endpoint not in self.proxies:
                self.proxies[member.endpoint] = self.names[member.name] = Proxy(self._loop, member.endpoint)
            members.append(msgspec.structs.replace(member, endpoint=self.proxies[member.endpoint].endpoint))
        super().push(msgspec.structs.replace(news, members=members))


class ProxiedRing(Server):
    """`proxies` by member's name: what others open to it passes through its proxy."""

    def __init__(self, deployment: Deployment, registry: ProxiedRegistry, folder: Path) -> None:
        self._folder, self._registry = folder, registry
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._specs = {spec.name: spec for spec in service_specs(deployment) if spec.service != "message_bus"}
        for name in self._specs:
            self.start(name)
        super().__init__(self.running["api_gateway 0"], deployment.gateways[0].port, time.perf_counter())

    @property
    def proxies(self) -> dict[str, Proxy]:
        return self._registry.names

    def start(self, name: str) -> None:
        """For the first time, or after its end."""
        spec = self._specs[name]
        path = self._folder / f"{name.replace(' ', '-')}.json"
        path.write_bytes(msgspec.json.encode(spec.config))
        command = [sys.executable, "-P", "-m", f"blockyard.services.{spec.service}", str(path)]
        env = os.environ | {"PYTHONPATH": str(ROOT / ".src")}
        with path.with_suffix(".log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        return (self._folder / f"{name.replace(' ', '-')}.log").read_text()


@contextlib.contextmanager
def proxied_ring(folder: Path, *flags: str, dead_after_s: float = 4.0) -> Iterator[ProxiedRing]:
    """`flags` as for `blockyard serve demo`. The registry is a thread of this process."""
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as other:
        bus_port, port = one.getsockname()[1], other.getsockname()[1]
    bus = BusConfig(registry=f"tcp://{HOST}:{bus_port}", bind=f"tcp://{HOST}", advertise=HOST)
    line = ["--model", "demo", "--host", HOST, "--port", str(port), *flags]
    values = parsed_flags.Values(parsed_flags.from_command_line(line)[0])
    deployment = resolve(values, model_files.find(values), bus)
    loop = asyncio.new_event_loop()
    threads = [threading.Thread(target=loop.run_forever, name="proxies")]
    threads[0].start()
    stopped, registry = threading.Event(), ProxiedRegistry(bus, loop)
    membership = Membership(time.monotonic(), dead_after_s=dead_after_s, settle_s=0.5)
    threads.append(threading.Thread(target=Registry(registry, membership).run, args=(stopped,), name="registry"))
    threads[1].start()
    ring = ProxiedRing(deployment, registry, folder)
    try:
        wait_ready(ring)
        yield ring
    finally:
        for process in ring.running.values():
            process.kill()
            process.wait()
        stopped.set()
        threads[1].join()
        registry.close()
        for proxy in registry.proxies.values():
            proxy.close()
        loop.call_soon_threadsafe(loop.stop)
        threads[0].join()
        loop.close()
