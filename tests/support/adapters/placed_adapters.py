"""Adapters in the places of a model, read without a reader. Imports no peft: it takes seconds."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import cast

import torch

from blockyard.services.gpu_worker.lora.cpu_products import CpuPlaces
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, read_modules
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.lora.worker_adapters import arrange_modules
from blockyard.services.gpu_worker.models.interface import Model

EXACT = AdapterLimits(dtype=torch.float32)


def read_adapter(folder: Path, targets: ModelTargets, limits: AdapterLimits) -> HostAdapter:
    return finished(arrange_modules(read_modules(folder, limits), targets, limits))


def finished(pieces: Generator[bool, None, HostAdapter]) -> HostAdapter:
    while True:
        try:
            next(pieces)
        except StopIteration as e:
            return cast(HostAdapter, e.value)


def adapt_model(
    model: Model, folders: Sequence[Path], undivided: Model | None = None, *, fully_sharded: bool = False
) -> None:
    """undivided: the declared model of which this rank has a part."""
    places = CpuPlaces(model, len(folders), fully_sharded=fully_sharded)
    targets = ModelTargets(model, undivided, fully_sharded=fully_sharded)
    for place, folder in enumerate(folders):
        places.put(place, finished(places.prepare(read_adapter(folder, targets, EXACT))))
