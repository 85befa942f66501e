"""`python -m blockyard.services.api_gateway SETTINGS`: the HTTP server of a deployment, or its batch."""

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from blockyard.services.api_gateway import garbage
from blockyard.services.api_gateway.batch_api.jobs import BatchJobs
from blockyard.services.api_gateway.batch_api.store import BatchStore
from blockyard.services.api_gateway.batches.batch_service import answer_batch
from blockyard.services.api_gateway.server import listening
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.messages import GatewayIn, Role
from blockyard.shared.process import settings
from blockyard.shared.process.liveness import LivenessPipe


async def serve_async(config: GatewayConfig) -> None:
    stopped, asked_to_reload = asyncio.Event(), asyncio.Event()
    has_key_files = bool(config.api_key_file or config.admin_key_file)
    if has_key_files:  # without a handler the signal would end a gateway that still starts
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked_to_reload.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    process, liveness = config.process, LivenessPipe(config.process.liveness_fd)
    links: Links[GatewayIn] = Links(process.name, Role.API_GATEWAY, process.bus, GatewayIn, liveness=liveness)
    with links:
        gateway = Gateway(config, links)
        store = BatchStore(Path(config.batch_dir), config.batch_retention_s) if config.batch_dir else None
        async with listening(config, gateway, store) as server, asyncio.TaskGroup() as tasks:
            ring = tasks.create_task(gateway.run(links))
            garbage.begin()
            collecting = tasks.create_task(garbage.collect(gateway))
            jobs = BatchJobs(config, store, gateway.pipeline, gateway.body_parser) if store is not None else None
            answering = tasks.create_task(jobs.run()) if jobs is not None else None
            refreshing = tasks.create_task(server.refresh_certificates())
            if has_key_files:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload_keys)
                if asked_to_reload.is_set():
                    server.reload_keys()
            links.update(
                ready=True,
                phase="ready",
                progress=1.0,
                notes=[f"socket {config.uds}" if config.uds else f"port {config.port}"],
            )
            await stopped.wait()
            if answering is not None:  # another gateway, or this one's successor, goes on
                answering.cancel()
            await server.drain()
            ring.cancel()
            collecting.cancel()
            refreshing.cancel()


def serve(config: GatewayConfig) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_async(config) if config.batch is None else answer_batch(config, config.batch))


if __name__ == "__main__":
    sys.exit(settings.run(GatewayConfig, serve))
