"""Reads an adapter from its folder, as far as that needs no model. Imports no layers: a reader is to start quickly."""

from dataclasses import dataclass
from pathlib import Path

import torch

from blockyard.services.gpu_worker.lora.adapter_files import read_folder
from blockyard.services.gpu_worker.lora.added_tokens.tokenizer_check import AdapterTexts
from blockyard.services.gpu_worker.lora.file_memory import FileMemory, MemoryPool
from blockyard.services.gpu_worker.lora.module_tensors import ModuleTensors, group_tensors, target_name
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import MAX_RANK, AdapterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """What a worker takes of adapters."""

    dtype: torch.dtype
    max_rank: int = MAX_RANK
    with_bias: bool = True
    max_rows: int = 256  # that an adapter may replace, of embedding and of head
    target_modules: tuple[str, ...] = ()  # last parts of module names that adapters may change; empty: all
    with_experts: bool = True  # without `target_modules`, adapters on a device may change experts
    fully_sharded: bool = False  # see `LayerShare`
    tokenizer_path: str = ""  # of the model's tokenizer; empty: those of adapters are not read


@dataclass(frozen=True, slots=True)
class ReadModules:
    """An adapter, read and checked as far as it can be without its model."""

    config: AdapterConfig
    modules: list[ModuleTensors]
    digest: bytes
    notes: list[str]  # on its config
    texts: AdapterTexts | None = None  # of the tokenizer in its folder; None: it has none
    memory: FileMemory | None = None  # where it was read, with most of the tensors
    form: bytes = b""  # see `reader_frames.form_of`


def read_modules(folder: Path, limits: AdapterLimits, threads: int = 1, pool: MemoryPool | None = None) -> ReadModules:
    """Reads an adapter, with its matrices in the dtype of products. Raises AdapterError with the cause in one line.

    threads: that read its file of weights. pool: of memory for it; None: it is new.
    """
    files = read_folder(folder, threads, limits.dtype, pool)
    try:
        modules = group_tensors(files.config, files.tensors, files.checks, with_bias=limits.with_bias)
        for module in modules:
            _check_limits(module, limits)
            module.convert(limits.dtype)
    except AdapterError as e:
        raise AdapterError(f"{files.weights_path.name}: {e}") from e
    return ReadModules(files.config, modules, files.digest, files.notes, memory=files.memory)


def _check_limits(module: ModuleTensors, limits: AdapterLimits) -> None:
    a = module.token_a if module.a is None else module.a
    if a is not None and not module.is_stack and a.shape[0] > limits.max_rank:
        raise AdapterError(f"the adapter has rank {a.shape[0]} for {module.name}; --max-lora-rank is {limits.max_rank}")
    if limits.target_modules and target_name(module) not in limits.target_modules:
        allowed = ", ".join(limits.target_modules)
        raise AdapterError(f"the adapter changes {module.name}; --lora-target-modules allows {allowed}")
