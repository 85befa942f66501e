"""`python -m blockyard.services.gpu_worker SETTINGS`: one worker, real or mock."""

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses, is_new, num_processes
from blockyard.services.gpu_worker.cores import usable_cores
from blockyard.services.gpu_worker.interfaces import OffloadableRunner
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.service import Worker
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Role, WorkerIn
from blockyard.shared.process import settings

# The real one imports torch, the mock must not: so they are found by name, here alone.
ENGINES = {"auto": "blockyard.services.gpu_worker.engine", "mock": "blockyard.services.gpu_worker.mock.runner"}

GPU = Path("/dev/nvidiactl")  # there is one where this can be opened

Report = Callable[[str, float, list[str]], None]  # phase, fraction done, notes so far


def serve(config: WorkerConfig) -> None:
    if config.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), config.gpu)
    if config.kernel_cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(Path(config.kernel_cache).absolute() / "triton")
    processes = start_compilers(config)
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
        start: Callable[[WorkerConfig, Report, CompileProcesses | None], OffloadableRunner] = engine.start
        held_bytes: Callable[[WorkerConfig], int] = engine.held_bytes
        runner = SleepingRunner(lambda: start(config, report, processes), lambda: held_bytes(config), freeze)
        links.update(ready=True)
        freeze()
        gc.disable()  # a collection would hold up a step
        Worker(links, runner).run(stopped)


def start_compilers(config: WorkerConfig, gpu: Path = GPU) -> CompileProcesses | None:
    """On a GPU whose kernels were never compiled here: processes import Triton while this one imports torch."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if config.worker_cls == "mock" or config.device == "cpu" or not gpu.exists() or not is_new(folder):
        return None
    processes = CompileProcesses(num_processes(usable_cores()))
    processes.start()
    return processes


def freeze() -> None:
    """What there is now is there to stay."""
    gc.collect()
    gc.freeze()


def own_gpu(visible: str | None, place: int) -> str:
    """CUDA's name of the GPU in that place among those that may be seen; the launcher has counted them."""
    return str(place) if visible is None else visible.split(",")[place].strip()


if __name__ == "__main__":
    sys.exit(settings.run(WorkerConfig, serve))
