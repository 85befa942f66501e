"""`python -m blockyard.services.gpu_worker SETTINGS`: one worker, real or mock."""

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable

from blockyard.services.gpu_worker.interfaces import ParkedRunner
from blockyard.services.gpu_worker.service import Worker
from blockyard.services.gpu_worker.sleep import SleepingRunner
from blockyard.shared import settings
from blockyard.shared.bus import Links
from blockyard.shared.config.worker import WorkerConfig
from blockyard.shared.messages import Role, WorkerIn

# The real one imports torch, the mock must not: so they are found by name, here alone.
ENGINES = {"auto": "blockyard.services.gpu_worker.engine", "mock": "blockyard.services.gpu_worker.mock"}

Report = Callable[[str, float, list[str]], None]  # phase, fraction done, notes so far


def serve(config: WorkerConfig) -> None:
    if config.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), config.gpu)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    model = config.served_model_names[0] if config.served_model_names else config.model_path
    links: Links[WorkerIn] = Links(
        config.process.name, Role.GPU_WORKER, config.process.bus, WorkerIn, model=model, own_heartbeat=True
    )
    with links:
        links.update(group=config.group)

        def report(phase: str, progress: float, notes: list[str]) -> None:
            links.update(phase=phase, progress=progress, notes=list(notes))

        engine = importlib.import_module(ENGINES[config.worker_cls])
        start: Callable[[WorkerConfig, Report], ParkedRunner] = engine.start
        held_bytes: Callable[[WorkerConfig], int] = engine.held_bytes
        runner = SleepingRunner(lambda: start(config, report), lambda: held_bytes(config), freeze)
        links.update(ready=True)
        freeze()
        gc.disable()  # a collection would hold up a step
        Worker(links, runner).run(stopped)


def freeze() -> None:
    """What there is now is there to stay."""
    gc.collect()
    gc.freeze()


def own_gpu(visible: str | None, place: int) -> str:
    """CUDA's name of the GPU in that place among those that may be seen; the launcher has counted them."""
    return str(place) if visible is None else visible.split(",")[place].strip()


if __name__ == "__main__":
    sys.exit(settings.run(WorkerConfig, serve))
