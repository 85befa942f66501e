"""`blockyard run gpu-worker --nnodes N`: starts the worker process of this host again when its group has ended."""

import asyncio
import signal
import sys

from setproctitle import setproctitle

from blockyard.services.launcher.supervision.child import ServiceSpec
from blockyard.services.launcher.supervision.hung import HungDetector
from blockyard.services.launcher.supervision.run_dir import RunDir
from blockyard.services.launcher.supervision.supervisor import StartFailed, Supervisor, kill_hung
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.process import logs
from blockyard.shared.process.liveness import TURNED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: WorkerConfig, hung_timeout_s: float) -> int:
    """Runs until SIGTERM and returns the exit code. Raises StartFailed.

    Until the ranks of this host serve for the first time, a wrong setting or a group that is not complete ends it.
    """
    process = config.process
    setproctitle(f"blockyard: launcher of {process.name}")
    logs.setup("launcher", process.log_level, process.log_config_file)
    with RunDir(None) as run_dir:
        supervisor = Supervisor([ServiceSpec("gpu_worker", config)], run_dir.path)
        asyncio.run(_run(supervisor, HungDetector(hung_timeout_s, long_turns=[process.name])))
    return 0


async def _run(supervisor: Supervisor, hung: HungDetector) -> None:
    [child] = supervisor.children
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopped.set)

    def on_signs(signs: bytes) -> None:
        if TURNED in signs and not supervisor.settled:
            supervisor.settle()
            print(f"{child.spec.name}: the ranks of this host serve", file=sys.stderr)

    async def drain() -> None:
        await stopped.wait()
        await supervisor.drain(0.0)

    try:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(kill_hung(supervisor, hung, on_signs)), tasks.create_task(drain())]
            await supervisor.supervise(child)
            if stopped.is_set():
                await others.pop()
            for other in others:
                other.cancel()
    except ExceptionGroup as group:
        failed, _ = group.split(StartFailed)
        if failed is None:
            raise
        raise failed.exceptions[0] from None
