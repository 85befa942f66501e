"""Reads an adapter of a model from its folder: checked, in the order of the model's products, in the model's dtype."""

from dataclasses import dataclass
from pathlib import Path

import torch

from blockyard.services.gpu_worker.lora.adapter_files import read_folder
from blockyard.services.gpu_worker.lora.module_tensors import ModuleTensors, group_tensors
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.targets import ModelTargets, last_name
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import MAX_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """What a worker takes of adapters."""

    dtype: torch.dtype
    max_rank: int = MAX_RANK
    with_bias: bool = True
    max_rows: int = 256  # that an adapter may replace, of embedding and of head
    target_modules: tuple[str, ...] = ()  # last parts of module names that adapters may change; empty: all


def read_adapter(folder: Path, targets: ModelTargets, limits: AdapterLimits) -> tuple[HostAdapter, list[str]]:
    """Returns an adapter and notes on its config. Raises AdapterError with the cause in one line."""
    files = read_folder(folder)
    try:
        modules = group_tensors(files.config, files.tensors, with_bias=limits.with_bias)
        for module in modules:
            _check_limits(module, limits)
        of_tokens = [module for module in modules if module.is_of_tokens]
        others = [module for module in modules if not module.is_of_tokens]
        deltas = targets.arrange(others, limits.dtype, files.config, limits.max_rank)
        tokens = targets.tokens.arrange(of_tokens, files.config, limits.dtype, limits.max_rows)
    except AdapterError as e:
        raise AdapterError(f"{files.weights_path}: {e}") from e
    return HostAdapter(files.digest, deltas, tokens), files.notes


def _check_limits(module: ModuleTensors, limits: AdapterLimits) -> None:
    a = module.token_a if module.a is None else module.a
    if a is not None and not module.is_stack and a.shape[0] > limits.max_rank:
        raise AdapterError(f"the adapter has rank {a.shape[0]} for {module.name}; --max-lora-rank is {limits.max_rank}")
    if limits.target_modules and last_name(module.name) not in limits.target_modules:
        allowed = ", ".join(limits.target_modules)
        raise AdapterError(f"the adapter changes {module.name}; --lora-target-modules allows {allowed}")
