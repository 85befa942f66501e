"""Reads a prompt adapter from its folder. Imports no layers: a reader is to start quickly."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockyard.services.gpu_worker.lora.adapter_files import digest_of, read_tensors
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_folder import read_whole, weights_file
from blockyard.shared.lora.prompt_config import read_prompt_config

TENSOR = "prompt_embeddings"  # PEFT's name, of P-tuning as of prompt tuning
LARGEST_BYTES = 8  # of a number in a file
OTHER_BYTES = 1 << 20  # of a file beside its numbers


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a worker takes of prompt adapters."""

    max_tokens: int  # virtual tokens
    width: int  # of the model's embeddings
    dtype: torch.dtype  # of the model


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The inputs of virtual tokens."""

    vectors: Tensor  # [virtual tokens, width], in the dtype of the model
    digest: bytes
    notes: list[str]


def read_prompt(folder: Path, limits: PromptLimits) -> ReadPrompt:
    """Raises AdapterError with the cause in one line. No more of a file is read than the largest adapter has."""
    content, config, notes = read_prompt_config(folder)
    if config.num_virtual_tokens > limits.max_tokens:
        raise AdapterError(
            f"num_virtual_tokens is {config.num_virtual_tokens}; at most {limits.max_tokens} are served "
            "(--max-prompt-adapter-token, and less than the model's context)"
        )
    path, width = weights_file(folder), limits.width
    most_numbers = config.num_virtual_tokens * max(width, config.token_dim or 0)
    weights = read_whole(path, most_numbers * LARGEST_BYTES + OTHER_BYTES)
    tensors = read_tensors(path, weights)
    if unknown := sorted(tensors.keys() - {TENSOR}):
        raise AdapterError(f"{path.name} has {unknown[0]}, which no prompt adapter has")
    if (vectors := tensors.get(TENSOR)) is None:
        raise AdapterError(f"{path.name} has no {TENSOR}")
    if vectors.dim() != 2 or vectors.shape[1] != width:
        raise AdapterError(
            f"{path.name}: {TENSOR} has the shape {list(vectors.shape)}; the model's embeddings have {width}"
        )
    if len(vectors) != config.num_virtual_tokens:
        num = config.num_virtual_tokens
        raise AdapterError(f"{path.name}: {TENSOR} has {len(vectors)} rows, num_virtual_tokens is {num}")
    vectors = vectors.to(limits.dtype)
    if not torch.isfinite(vectors).all():
        raise AdapterError(f"{path.name}: {TENSOR} has numbers that are not finite")
    return ReadPrompt(vectors, digest_of(content, weights), notes)
