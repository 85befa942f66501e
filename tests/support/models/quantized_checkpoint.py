"""Tiny quantized checkpoints beside the ones with the numbers that they stand for, and the logits of both.

A test of a format gives `write` a function that stores one matrix in the layout of the format, from random integers and
scales, and says what numbers these are. Where inputs are rounded, too, `logits` rounds those of the plain checkpoint.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_logits import all_logits
from plan_driver import Driver
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, Tiny, start
from torch import Tensor

from blockyard.services.gpu_worker.quantization.dense import UnquantizedLinear
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import Sampling

IDS = [5, 9, 3, 17, 2, 60, 99, 140, 7, 31, 4, 77]

# the tensors of a matrix by the last parts of their names, and the numbers that they stand for
Stored = tuple[Mapping[str, Tensor], Tensor]
# takes the name of a matrix and its numbers in the unquantized model; returns the tensors to store, by full name, and
# the numbers that they stand for; None: it stays as it is
Store = Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor] | None]

# a model of which every matrix has whole runs of 64 outputs
EVEN = replace(BY_NAME["llama"], fields=BY_NAME["llama"].fields | {"intermediate_size": 128, "num_key_value_heads": 4})


@dataclass(frozen=True, slots=True)
class Checkpoints:
    plain: Path  # the numbers that the other one stands for
    packed: Path


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint of a format. The test of each has `SAMPLES`, by the `quant_method` of files."""

    write: Callable[[Path], Checkpoints]
    round_inputs: Callable[[Tensor], Tensor] | None = None  # what quantized layers multiply; None: inputs as they are
    model: str = "llama"  # in 16 bits, with matrices that the format quantizes while they load, if it does


def write(folder: Path, model: str | Tiny, store: Store, files: Mapping[str, Any]) -> Checkpoints:
    """Writes both checkpoints of a model, by its name one of `tiny_models`.

    files: JSON files of the quantized one by name; the fields of "config.json" are added to the model's.
    """
    made = Checkpoints(folder / "plain", folder / "packed")
    (BY_NAME[model] if isinstance(model, str) else model).save(made.plain)
    config, shards = json.loads((made.plain / "config.json").read_text()), list(made.plain.glob("*.safetensors"))
    tensors = {name: value for file in shards for name, value in load_file(file).items()}
    for file in [*shards, *made.plain.glob("*.index.json")]:
        file.unlink()
    torch.manual_seed(4)
    packed = dict(tensors)
    for name in sorted(name for name, value in tensors.items() if value.dim() == 2 and name.endswith(".weight")):
        stored = store(name.removesuffix(".weight"), tensors[name])
        if stored is not None:
            del packed[name]
            packed |= stored[0]
            tensors[name] = stored[1].contiguous()
    made.packed.mkdir()
    save_file(tensors, made.plain / "model.safetensors")
    save_file({name: value.contiguous() for name, value in packed.items()}, made.packed / "model.safetensors")
    for name, fields in ({"config.json": {}} | dict(files)).items():
        (made.packed / name).write_text(json.dumps(config | fields if name == "config.json" else fields))
    return made


def write_projections(
    folder: Path,
    model: str | Tiny,
    said: Mapping[str, Any],
    draw: Callable[[int, int], Stored],
    left_out: Collection[str] = (),
) -> Checkpoints:
    """Writes checkpoints of which each linear layer is quantized. said: quantization_config. draw: makes a matrix of so
    many outputs and inputs. left_out: names of matrices that stay as they are."""

    def store(name: str, weight: Tensor) -> Stored | None:
        if not is_projection(name) or name in left_out:
            return None
        outputs, inputs = weight.shape
        stored, numbers = draw(outputs, inputs)
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers

    return write(folder, model, store, {"config.json": {"quantization_config": said}})


def change_tensors(made: Checkpoints, change: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Changes tensors of the quantized checkpoint by name. Returns all."""
    file = made.packed / "model.safetensors"
    tensors = {name: change(name, value).contiguous() for name, value in load_file(file).items()}
    save_file(tensors, file)
    return tensors


def replace_tensors(made: Checkpoints, changed: Mapping[str, Tensor]) -> None:
    """Replaces or adds tensors of the quantized checkpoint by name."""
    file = made.packed / "model.safetensors"
    save_file(load_file(file) | changed, file)


def check_lack(made: Checkpoints, name: str) -> None:
    """Asserts that a start names a tensor that the quantized checkpoint has no more."""
    file = made.packed / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(LoadError, match=rf"the checkpoint lacks {re.escape(name)}$"):
        start(made.packed)


def kept_tensors(runner: Runner, name: str) -> list[Tensor]:
    """The tensors of all linear layers that their forms call so."""
    methods = [linear.method.tensors() for linear in runner.model.linears()]
    return [own for one in methods for key, own in one.items() if key.rpartition(".")[2] == name]


def is_projection(name: str) -> bool:
    """Whether a matrix is a linear layer that files quantize by themselves: no router, head or embedding."""
    return name.endswith(("_proj", "_proj_with_mqa", ".w1", ".w2", ".w3"))


def logits(runner: Runner) -> Tensor:
    """Of a prompt and of decode steps behind it, [tokens, vocab_size]."""
    return all_logits(runner, IDS, [len(IDS) - 3, 1, 1, 1])


def check_logits(
    checkpoints: Checkpoints,
    round_inputs: Callable[[Tensor], Tensor] | None = None,
    packed_fields: Mapping[str, Any] = {},
    **fields: Any,
) -> Runner:
    """Asserts that both checkpoints have the same logits, within 1e-4 in float32. Returns the quantized one's runner.

    round_inputs: x [rows, inputs] to what quantized layers multiply. None: inputs are not rounded. packed_fields: of
    the quantized one's worker alone.
    """
    plain = start(checkpoints.plain, max_model_len=64, **fields)
    packed = start(checkpoints.packed, max_model_len=64, **fields | packed_fields)
    if round_inputs is not None:
        for linear, like in zip(plain.model.linears(), packed.model.linears(), strict=True):
            if not isinstance(like.method, UnquantizedLinear):
                linear.wrap(lambda product: lambda x: product(round_inputs(x)))
    torch.testing.assert_close(logits(packed), logits(plain), atol=1e-4, rtol=1e-4)
    return packed


def greedy_tokens(runner: Runner) -> list[int]:
    """Twelve tokens behind a short prompt."""
    driver = Driver(runner)
    stream = driver.add([5, 9, 3], Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
    driver.run()
    return stream.output


def check_dummy_weights(folder: Path) -> None:
    """Asserts that the weights of --load-format dummy stand for numbers as those of a model that is not quantized."""
    runner = start(folder, load_format="dummy", max_model_len=64)
    assert torch.isfinite(logits(runner)).all()
    kept = [linear for linear in runner.model.linears() if isinstance(linear.method, KeptLinear)]
    assert len(kept) > 5
    for linear in kept:
        numbers = linear(torch.eye(linear.shape[0]))
        assert 0.015 < float(numbers.std()) < 0.025
        assert abs(float(numbers.mean())) < 0.06 * float(numbers.std()), "even about zero"
