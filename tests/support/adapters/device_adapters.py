"""Runners whose adapters are in places of a device: of a GPU, or of the CPU with the references of the kernels."""

from pathlib import Path
from typing import Any

import torch
from placed_adapters import KERNELS
from reference_ops import run_ahead
from tiny_models import start

from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.lora.device.device_places import DevicePlaces
from blockyard.services.gpu_worker.prompt_adapters.adapter_hosts import adapter_limits
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig

CAPACITY = 16  # of steps of a GPU on the CPU


def start_on(device: str, folder: Path, lora: LoraConfig, **fields: Any) -> Runner:
    """device: cuda, cpu, or reference: the CPU with the steps and the places of a GPU, in plain torch."""
    if device == "cuda":
        return start(folder, device="cuda", lora=lora, **fields)
    runner = start(folder, lora=lora, **fields)
    if device == "reference":
        assert runner.adapters is not None and runner.adapters.lora is not None
        limits = adapter_limits(lora, runner.model.table.dtype)
        with torch.inference_mode():  # as a worker starts
            places = DevicePlaces(runner.model, lora.max_loras, limits, KERNELS, torch.device("cpu"), SameMemory())
        runner.adapters.lora.places = places
        run_ahead(runner, CAPACITY)
    return runner
