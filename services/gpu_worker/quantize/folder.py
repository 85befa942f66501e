"""Reads a model folder and writes the quantized one, file by file and tensor by tensor."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS
from blockyard.services.gpu_worker.quantization.names import HEAD, NamePatterns, is_left_out, layer_of
from blockyard.services.gpu_worker.quantize.rounding import Rounding, config, round_matrix
from blockyard.shared.config.pooling.sentence_modules import module_folders
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import read_json
from blockyard.shared.quantization.files import read_quantization
from blockyard.shared.quantization.reading import KEY
from blockyard.shared.quantization.table import W4

INDEX = "model.safetensors.index.json"
WEIGHT = ".weight"
CONV1D = frozenset({"GPT2LMHeadModel", "OpenAIGPTLMHeadModel"})  # architectures
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # ends of names of files that are not copied


@dataclass(slots=True)
class Layer:
    """The sizes and the error of a layer of the model."""

    bytes_before: int = 0
    bytes_after: int = 0
    error: float = 0.0  # sum of squares
    size: float = 0.0  # sum of squares of the weights

    @property
    def relative_error(self) -> float:
        return (self.error / self.size) ** 0.5 if self.size else 0.0


@dataclass(slots=True)
class Written:
    layers: dict[str, Layer] = field(default_factory=dict)  # by prefix; "" has the matrices in no layer
    ignored: list[str] = field(default_factory=list)
    weight_map: dict[str, str] = field(default_factory=dict)  # tensor -> file
    size_bytes: int = 0


def quantize(source: Path, target: Path, how: Rounding) -> Written:
    """Raises ConfigError for a folder that cannot be quantized, or a target that has something."""
    said = read_json(source / "config.json")
    if text_part(said).get(KEY) or read_quantization(source, said).said:
        raise ConfigError(f"{source}: the checkpoint is quantized already")
    if CONV1D.intersection(said.get("architectures") or []):
        raise ConfigError(
            f"{source}: its layers are Conv1D, stored as [inputs, outputs], which compressed-tensors does not have; "
            "--quantization fp8 quantizes them while they load"
        )
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{source}: no .safetensors files")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target}: the folder is not empty")
    folders, patterns, written = module_folders(source), NamePatterns(how.ignore), Written()
    _check(source, files, how, patterns)
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        tensors = dict(_rounded(file, how, patterns, written))
        save_file(tensors, target / file.name, {"format": "pt"})
        written.weight_map |= dict.fromkeys(tensors, file.name)
    _copy_others(source, target)
    for name in (one for one in folders if (source / one).is_dir()):  # some modules have nothing to say
        shutil.copytree(source / name, target / name, dirs_exist_ok=True)
    ignored = [HEAD, *(name for name in written.ignored if name.rpartition(".")[2] != HEAD)]
    _write(target / "config.json", said | {KEY: config(how, ignored)})
    if len(files) > 1:
        _write(target / INDEX, {"metadata": {"total_size": written.size_bytes}, "weight_map": written.weight_map})
    return written


def _check(source: Path, files: list[Path], how: Rounding, patterns: NamePatterns) -> None:
    """Raises ConfigError for groups that do not divide a matrix, for patterns that mean none, and if nothing is left to
    quantize."""
    num_linear = 0
    for file in files:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                base, shape = name.removesuffix(WEIGHT), stored.get_slice(name).get_shape()
                if patterns.match(base) or not _is_linear(name, len(shape)):
                    continue
                num_linear += 1
                if how.to == W4 and shape[1] % how.group:
                    raise ConfigError(f"--group {how.group}: {base} has {shape[1]} inputs; --ignore it")
    unused = [name for name in patterns.unused() if name != HEAD]  # which is never quantized, and may be an embedding
    if unused:
        raise ConfigError(f"--ignore {unused[0]}: no matrix of the model has that name")
    if not num_linear:
        raise ConfigError(f"{source}: no linear layer is left to quantize")


def _rounded(file: Path, how: Rounding, patterns: NamePatterns, written: Written) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, "pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            tensor: Tensor = stored.get_tensor(name)
            layer = written.layers.setdefault(layer_of(name), Layer())
            layer.bytes_before += tensor.nbytes
            tensors = {name: tensor}
            base = name.removesuffix(WEIGHT)
            if tensor.dtype in FLOATS and _is_linear(name, tensor.dim()) and not patterns.match(base):
                made, numbers = round_matrix(tensor, how)
                tensors = {f"{base}.{key}": value.contiguous() for key, value in made.items()}
                layer.error += float((numbers - tensor.float()).square().sum(dtype=torch.float64))
                layer.size += float(tensor.float().square().sum(dtype=torch.float64))
            elif tensor.dim() > 1 and not name.endswith("bias"):  # those of stacked experts are stacks, too
                written.ignored.append(base)
            layer.bytes_after += sum(one.nbytes for one in tensors.values())
            written.size_bytes += sum(one.nbytes for one in tensors.values())
            yield from tensors.items()


def _is_linear(name: str, dims: int) -> bool:
    """Whether it is a matrix of a layer, without routers."""
    is_one = name.endswith(WEIGHT) and dims == 2 and bool(layer_of(name))
    return is_one and not is_left_out(name.removesuffix(WEIGHT))


def _copy_others(source: Path, target: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((*_WEIGHTS, ".index.json")) and file.name != "config.json":
            shutil.copyfile(file, target / file.name)


def _write(file: Path, what: dict[str, Any]) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(what), indent=2))
