"""Reads a model folder and writes the quantized one, file by file and tensor by tensor."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
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
from blockyard.services.gpu_worker.quantize.stacked_experts import are_left_out, find_stacks
from blockyard.shared.config.pooling.sentence_modules import module_folders
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import read_json
from blockyard.shared.quantization.files import read_quantization
from blockyard.shared.quantization.reading import KEY
from blockyard.shared.quantization.table import W4
from blockyard.shared.weight_files import INDEX

WEIGHT = ".weight"
STACK_DIMS = 3
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
    stacks: dict[str, int] = field(default_factory=dict)  # bytes by name of stacked experts that stay as they are
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
    folders, written, shapes = module_folders(source), Written(), _read_shapes(files)
    plan = _Plan(said, shapes, how)
    plan.check(source, shapes)
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        tensors = dict(_rounded(file, plan, written))
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


def _read_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    made = dict[str, tuple[int, ...]]()
    for file in files:
        with safe_open(file, "pt") as stored:
            made |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    return made


class _Plan:
    """Which matrices are rounded."""

    def __init__(self, said: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], how: Rounding) -> None:
        self.how, self._patterns = how, NamePatterns(how.ignore)
        self.stacks = find_stacks(shapes, text_part(said), self._patterns)
        self._left_out = are_left_out(self.stacks.values(), self._patterns)

    def rounds(self, name: str, dims: int) -> bool:
        """Whether a tensor of this name is rounded. Stacks are cut before."""
        base = name.removesuffix(WEIGHT)
        return not self._patterns.match(base) and base not in self._left_out and _is_linear(name, dims)

    def check(self, source: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises ConfigError for groups that do not divide a matrix, for patterns that mean none, and if nothing is
        left to quantize."""
        inputs = {
            name.removesuffix(WEIGHT): shape[1] for name, shape in shapes.items() if self.rounds(name, len(shape))
        }
        for stack in self.stacks.values():
            if stack.inputs is not None:
                inputs |= dict.fromkeys(set(stack.bases()) - self._left_out, stack.inputs)
        if self.how.to == W4:
            for base, count in inputs.items():
                if count % self.how.group:
                    raise ConfigError(f"--group {self.how.group}: {base} has {count} inputs; --ignore it")
        # a head is never quantized, and may be an embedding
        unused = [name for name in self._patterns.unused() if name != HEAD]
        if unused:
            raise ConfigError(f"--ignore {unused[0]}: no matrix of the model has that name")
        if not inputs:
            raise ConfigError(f"{source}: no linear layer is left to quantize")


def _rounded(file: Path, plan: _Plan, written: Written) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, "pt") as stored:
        for whole in stored.keys():  # noqa: SIM118
            tensor: Tensor = stored.get_tensor(whole)
            stack = plan.stacks.get(whole)
            for name, one in [(whole, tensor)] if stack is None else stack.cut(tensor):
                yield from _round(name, one, plan, written).items()


def _round(name: str, tensor: Tensor, plan: _Plan, written: Written) -> dict[str, Tensor]:
    """The tensors to store in the place of one."""
    layer = written.layers.setdefault(layer_of(name), Layer())
    layer.bytes_before += tensor.nbytes
    tensors, base = {name: tensor}, name.removesuffix(WEIGHT)
    if tensor.dtype in FLOATS and plan.rounds(name, tensor.dim()):
        made, numbers = round_matrix(tensor, plan.how)
        tensors = {f"{base}.{key}": value.contiguous() for key, value in made.items()}
        layer.error += float((numbers - tensor.float()).square().sum(dtype=torch.float64))
        layer.size += float(tensor.float().square().sum(dtype=torch.float64))
    elif tensor.dim() > 1 and not name.endswith("bias"):  # those of stacked experts are stacks, too
        written.ignored.append(base)
        if tensor.dim() == STACK_DIMS and layer_of(name) and min(tensor.shape) > 1:  # and no convolution of channels
            written.stacks[base] = tensor.nbytes
    layer.bytes_after += sum(one.nbytes for one in tensors.values())
    written.size_bytes += sum(one.nbytes for one in tensors.values())
    return tensors


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
