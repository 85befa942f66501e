"""`worker_cls` to the module that serves it, by name: the mock must not pay for torch."""

import importlib
from typing import Protocol, cast

from blockyard.shared.config.worker import WorkerConfig

# each has serve(config), which returns when the worker is told to end
MODULES = {
    "auto": "blockyard.services.gpu_worker.service",
    "mock": "blockyard.services.gpu_worker.mock",
}


class _Worker(Protocol):
    def serve(self, config: WorkerConfig) -> None: ...


def serve(config: WorkerConfig) -> None:
    cast(_Worker, importlib.import_module(MODULES[config.worker_cls])).serve(config)
