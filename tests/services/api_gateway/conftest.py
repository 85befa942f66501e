"""A real HTTP server on a real socket, with a fake ring in the test's event loop."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from fake_ring import CARD, FakeRing
from tcp_addresses import free_port

from blockyard.services.api_gateway.batch_api.jobs import BatchJobs
from blockyard.services.api_gateway.batch_api.store import BatchStore
from blockyard.services.api_gateway.server import HttpServer, listening
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.messages import ModelSettings

PROCESS = ProcessConfig(name="api_gateway", bus=BusConfig(registry="ipc:///none", bind="ipc:///none"))


@dataclass
class Rig:
    ring: FakeRing
    gateway: Gateway
    server: HttpServer
    port: int
    http: aiohttp.ClientSession
    gateway_config: GatewayConfig

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """Status and decoded body. `body` is bytes, or goes out as JSON."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} | kwargs.pop("headers", {})
        async with self.http.post(path, data=data, headers=headers, **kwargs) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The decoded data of a streamed answer's events; "[DONE]" stays text."""
        async with self.http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        data = [e.removeprefix("data: ") for e in text.split("\n\n") if e.startswith("data: ")]
        return [d if d == "[DONE]" else msgspec.json.decode(d) for d in data]

    async def until(self, condition: Callable[[], bool], patience_s: float = 5.0) -> None:
        async with asyncio.timeout(patience_s):
            while not condition():
                await asyncio.sleep(0.005)


async def _silence() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


@asynccontextmanager
async def _rig(join: bool = True, max_model_len: int = CARD.max_model_len, **fields: Any) -> AsyncIterator[Rig]:
    settings = {name: fields.pop(name) for name in ModelSettings.__struct_fields__ if name in fields}
    pooling = fields.pop("pooling", None)
    config = GatewayConfig(process=PROCESS, **{"host": "127.0.0.1", "port": 0, "reuse_port": False} | fields)
    ring = FakeRing(ModelSettings(**settings), max_model_len, pooling)
    gateway = Gateway(config, ring)
    ring.receive = gateway.handle
    store = BatchStore(Path(config.batch_dir), config.batch_retention_s) if config.batch_dir else None
    async with listening(config, gateway, store) as server:
        loop = asyncio.create_task(gateway.run(_silence()))
        jobs = None if store is None else BatchJobs(config, store, gateway.pipeline, gateway.body_parser)
        answering = asyncio.create_task(asyncio.sleep(0) if jobs is None else jobs.run())
        if join:
            ring.join_all()
        port = server.port
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            yield Rig(ring, gateway, server, port, http, config)
        answering.cancel()
        await asyncio.wait((answering,))
        loop.cancel()
        await asyncio.wait((loop,))


@pytest.fixture
def rig() -> Callable[..., AbstractAsyncContextManager[Rig]]:
    """`async with rig(**fields of GatewayConfig and ModelSettings) as r`, with its `max_model_len`, `pooling`."""
    return _rig


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs each coroutine test in an event loop of its own, as the service runs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    uvloop.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def unused_port() -> int:
    return free_port()
