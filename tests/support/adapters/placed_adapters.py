"""Adapters in the places of a model, read without a reader. Imports no peft: it takes seconds."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from blockyard.kernels.lora.adapter_table import start_adapters_reference
from blockyard.kernels.lora.adapter_tokens import adapt_embeddings_reference, replace_logits_reference
from blockyard.kernels.lora.add_to_heads import add_to_heads_reference
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.lora.cpu_products import CpuPlaces
from blockyard.services.gpu_worker.lora.device.device_places import DevicePlaces
from blockyard.services.gpu_worker.lora.device.device_products import AdapterKernels
from blockyard.services.gpu_worker.lora.places import AdapterPlaces, HostAdapter
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, read_modules
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.lora.worker_adapters import arrange_modules
from blockyard.services.gpu_worker.models.interface import Model

EXACT = AdapterLimits(dtype=torch.float32)
KERNELS = AdapterKernels(
    start_adapters_reference, add_to_heads_reference, adapt_embeddings_reference, replace_logits_reference
)


def read_adapter(folder: Path, targets: ModelTargets, limits: AdapterLimits) -> HostAdapter:
    return finished(arrange_modules(read_modules(folder, limits), targets, limits))


def finished(pieces: Generator[bool, None, HostAdapter]) -> HostAdapter:
    while True:
        try:
            next(pieces)
        except StopIteration as e:
            return cast(HostAdapter, e.value)


def adapt_model(
    model: Model,
    folders: Sequence[Path],
    undivided: Model | None = None,
    *,
    fully_sharded: bool = False,
    as_gpu: bool = False,
) -> None:
    """undivided: the declared model of which this rank has a part. as_gpu: in the places of a GPU, in plain torch."""
    places: AdapterPlaces = CpuPlaces(model, len(folders), fully_sharded=fully_sharded)
    if as_gpu:
        limits = replace(EXACT, max_rank=16, fully_sharded=fully_sharded)
        places = DevicePlaces(model, len(folders), limits, KERNELS, torch.device("cpu"), SameMemory())
    targets = ModelTargets(model, undivided, fully_sharded=fully_sharded)
    for place, folder in enumerate(folders):
        places.put(place, finished(places.prepare(read_adapter(folder, targets, EXACT))))
