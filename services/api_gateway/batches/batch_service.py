"""The gateway's process with a batch in place of listening sockets."""

import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from blockyard.services.api_gateway.batches.batch_files import OutputFile
from blockyard.services.api_gateway.batches.batch_run import BatchRun, LineLimits
from blockyard.services.api_gateway.batches.line_records import LineRecords
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.batch import BatchConfig
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import GatewayIn, Role
from blockyard.shared.process.liveness import LivenessPipe

log = logging.getLogger(__name__)


async def answer_batch(config: GatewayConfig, batch: BatchConfig) -> None:
    """Returns when all lines are answered. Raises BatchError, and after SIGTERM a BlockyardError.

    After SIGTERM, lines that are not answered within --shutdown-timeout are not in the output.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    process, liveness = config.process, LivenessPipe(config.process.liveness_fd)
    links: Links[GatewayIn] = Links(process.name, Role.API_GATEWAY, process.bus, GatewayIn, liveness=liveness)
    with links, contextlib.closing(OutputFile(Path(batch.output))) as output:
        gateway = Gateway(config, links)
        with contextlib.closing(LineRecords()) as records:
            limits = LineLimits(config.max_body_bytes)
            run = BatchRun(batch, limits, gateway.pipeline, gateway.body_parser, output, output, records)
            failed: BlockyardError | None = None
            async with asyncio.TaskGroup() as tasks:
                ring = tasks.create_task(gateway.run(links))
                links.update(ready=True, phase="ready", progress=1.0, notes=[f"answers {batch.input}"])
                try:
                    await run_until(run, stopped, config.shutdown_timeout_s)
                except BlockyardError as e:
                    failed = e
                ring.cancel()
        log.info("%s", run.summary())
        if failed is not None:
            raise failed


async def run_until(run: BatchRun, stopped: asyncio.Event, patience_s: float) -> None:
    """Runs a batch. After `stopped`, lines that were read have `patience_s`. Raises BlockyardError."""
    running, stop = asyncio.ensure_future(run.run()), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            run.stop()
            await asyncio.wait((running,), timeout=patience_s)
        if running.done():
            running.result()
        if stop.done():
            raise BlockyardError("the batch was stopped before its last line")
    finally:
        running.cancel()
        stop.cancel()
        await asyncio.wait((running, stop))
