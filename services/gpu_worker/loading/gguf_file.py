"""Reads tensors of .gguf files under the names, and with the rows in the order, that checkpoints of transformers have.

A matrix of blocks is bytes uint8 [outputs, bytes of a row], and its header says the type of the blocks. Documented in
ggml (docs/gguf.md) and llama.cpp (gguf-py/gguf/tensor_mapping.py; convert_hf_to_gguf.py, where `permute` reorders rows
of q and k for the architecture "llama"). The package gguf, an extra, reads the file.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_headers import TensorHeader
from blockyard.shared.errors import ConfigError, LoadError

gguf: Any
try:  # an extra
    import gguf
except ImportError:
    gguf = None

SUFFIX = ".gguf"
LLAMA = "llama"
ARCHITECTURES = (LLAMA, "qwen2", "qwen3")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    **{f"attn_{key}": f"self_attn.{key}_proj" for key in "qkv"},
    **{f"attn_{key}_norm": f"self_attn.{key}_norm" for key in "qk"},
    **{f"ffn_{key}": f"mlp.{key}_proj" for key in ("gate", "up", "down")},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}
_UNUSED = ("rope_freqs.weight",)  # config.json has the rotation
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class GgufTensor(NamedTuple):
    name: str  # in transformers
    header: TensorHeader
    read: Callable[[], Tensor]


def package() -> Any:
    """The package gguf. Raises ConfigError if it is not installed."""
    if gguf is None:
        raise ConfigError("GGUF files need the package gguf: pip install 'blockyard[gguf]'")
    return gguf


def check_files(files: list[Path]) -> None:
    """Raises LoadError for several files that are no parts of one."""
    if len(files) > 1 and not all(_SPLIT.search(file.name) for file in files):
        raise LoadError(f"{files[0].parent} has several .gguf files: {', '.join(file.name for file in files)}")


def tensors_of(file: Path) -> Iterator[GgufTensor]:
    """Raises LoadError for a file that cannot be read, and for architectures and names that are not known."""
    found = package()
    try:
        reader = found.GGUFReader(file)
        architecture = _field(reader, "general.architecture")
        heads = [_field(reader, f"{architecture}.attention.head_count{kind}") for kind in ("", "_kv")]
    except (ValueError, KeyError, IndexError, OSError, TypeError) as e:
        raise LoadError(f"{file} is not a usable GGUF file: {e}") from e
    if architecture not in ARCHITECTURES and (reader.tensors or architecture is not None):
        known = ", ".join(ARCHITECTURES)
        raise LoadError(f"{file}: general.architecture is {architecture!r}; {known} are read")
    for one in reader.tensors:
        if one.name in _UNUSED:
            continue
        name, kind = hf_name(file, one.name), one.tensor_type.name
        is_turned = architecture == LLAMA and re.search(r"\.attn_[qk]\.", one.name) is not None
        num_heads = heads[1] if ".attn_k." in one.name and heads[1] is not None else heads[0]
        if is_turned and num_heads is None:
            raise LoadError(f"{file}: {architecture}.attention.head_count is missing, by which {one.name} has its rows")
        if is_turned and (not isinstance(num_heads, int) or num_heads < 1 or one.data.shape[0] % (2 * num_heads)):
            raise LoadError(f"{file}: {one.name} has {one.data.shape[0]} rows, no whole pairs of {num_heads} heads")
        shape = tuple(int(size) for size in one.shape[::-1])
        if kind in FLOATS:
            header = TensorHeader(shape, FLOATS[kind])
        else:
            header = TensorHeader(tuple(one.data.shape), torch.uint8, kind)
        yield GgufTensor(name, header, partial(_read, one.data, header, num_heads if is_turned else None))


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def hf_name(file: Path, name: str) -> str:
    """The name of a tensor in transformers. Raises LoadError."""
    found = _NAME.fullmatch(name)
    if found is not None:
        layer, key, kind = found.groups()
        if layer is None and key in _TOP:
            return f"{_TOP[key]}.{kind}"
        if layer is not None and key in _LAYER:
            return f"model.layers.{layer}.{_LAYER[key]}.{kind}"
    raise LoadError(f"{file}: a tensor {name} is not known")


def _read(data: Any, header: TensorHeader, num_heads: int | None) -> Tensor:
    """num_heads: of a matrix with rows in llama.cpp's order."""
    stored = torch.from_numpy(data.copy())  # of a file that is mapped for reading
    if header.dtype != stored.dtype:
        stored = stored.view(header.dtype)
    stored = stored.view(header.shape)
    if num_heads is None:
        return stored
    halves = torch.unflatten(stored, 0, (num_heads, -1, 2))
    return halves.transpose(1, 2).reshape(header.shape)
