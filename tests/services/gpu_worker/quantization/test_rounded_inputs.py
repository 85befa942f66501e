"""Models with rounded inputs against transformers, layer by layer.

A difference of 1e-7 may move a number to the next code of 8 bits, and that moves what follows by percents: two correct
models differ in logits by more than rounding. So the reference checks each input that it makes itself, and then goes on
with the worker's.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compressed_files import FLOAT, scheme, write_packed
from model_logits import all_logits
from quantized_checkpoint import IDS
from safetensors.torch import load_file
from tiny_models import BY_NAME, start
from torch import Tensor
from transformers import LlamaForCausalLM

from blockyard.services.gpu_worker.quantize.folder import quantize
from blockyard.services.gpu_worker.quantize.rounding import Rounding
from blockyard.services.gpu_worker.runner import Runner

E4M3 = torch.float8_e4m3fn
GROUP = 128  # inputs
# the second group of inputs is incomplete, and so is the second block of rows
WIDE = replace(
    BY_NAME["llama"],
    fields=BY_NAME["llama"].fields
    | {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 224}
    | {"initializer_range": 0.1},
)
INPUT_SCALES = {"k_proj": 0.004, "gate_proj": 0.01, "": 0.02}  # "": of others; of parts of a product the largest counts
Round = Callable[[Tensor], tuple[Tensor, Tensor]]  # x [rows, inputs] -> codes and scales, both in float64


def by_scale(x: Tensor, scales: Tensor, most: float = 448.0, integers: bool = False) -> tuple[Tensor, Tensor]:
    """The definition: x / scale, to the nearest number that a code may be."""
    ratios = (x / scales).clamp(-most, most)
    return (ratios.round() if integers else ratios.to(E4M3)).double(), scales.double()


def of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return by_scale(x, x.abs().amax(1, keepdim=True) / 448)


def of_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    return by_scale(x, x.abs().amax(1, keepdim=True) / 127, 127.0, integers=True)


def of_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.stack([one.abs().amax(1) / 448 for one in x.split(GROUP, 1)], 1)
    return by_scale(x, scales.repeat_interleave(GROUP, 1)[:, : x.shape[1]])


def of_file(x: Tensor) -> tuple[Tensor, Tensor]:
    return by_scale(x, torch.tensor(INPUT_SCALES[""]))


def numbers_of_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    rows, columns = codes.shape
    return codes.double() * scales.double().repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]


def numbers_of_rows(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * scales.double()


def record(runner: Runner) -> list[Tensor]:
    """The inputs of products in the order in which they are multiplied, as they come."""
    seen = list[Tensor]()

    def recorded(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        seen.append(x.clone())
        return product(x)

    for linear in runner.model.linears():
        linear.wrap(lambda product: partial(recorded, product))
    return seen


def follow(model: LlamaForCausalLM, weights: dict[str, Tensor], inputs: Iterator[Tensor], round_: Round) -> None:
    """Makes each linear layer check its input, and multiply what the worker's becomes in 8 bits."""
    shared: dict[str, Tensor] = {}

    def forward(name: str, x: Tensor) -> Tensor:
        if name.rpartition(".")[2] not in ("k_proj", "v_proj", "up_proj"):  # the worker has one product of them
            shared["x"] = next(inputs)
        given = shared["x"]
        torch.testing.assert_close(given, x.view(given.shape), atol=2e-5, rtol=2e-5, msg=lambda m: f"{name}: {m}")
        if name not in weights:  # the head
            return F.linear(given, model.lm_head.weight).view(*x.shape[:-1], -1)
        codes, scales = round_(given)
        return ((codes * scales) @ weights[name].T).float().view(*x.shape[:-1], -1)

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = partial(forward, name)


def write_static(folder: Path) -> Path:
    def change(name: str, stored: dict[str, Tensor]) -> None:
        stored["input_scale"] = torch.tensor([INPUT_SCALES.get(name.rpartition(".")[2], INPUT_SCALES[""])])

    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    own = scheme(kind | {"strategy": "channel"}, kind | {"strategy": "tensor", "dynamic": False})
    return write_packed(folder, WIDE, FLOAT, own, change).packed


def write_rounded(folder: Path, to: str) -> Path:
    WIDE.save(folder / "source")
    quantize(folder / "source", folder / "packed", Rounding(to))
    return folder / "packed"


CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Tensor, Tensor], Tensor], Round]] = {
    "static": (write_static, numbers_of_rows, of_file),
    "fp8": (partial(write_rounded, to="fp8"), numbers_of_rows, of_rows),
    "fp8-block": (partial(write_rounded, to="fp8-block"), numbers_of_blocks, of_groups),
    "int8": (partial(write_rounded, to="int8"), numbers_of_rows, of_integers),
}


@pytest.mark.parametrize("kind", CASES)
def test_every_layer_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    write_, numbers, round_ = CASES[kind]
    folder = write_(tmp_path)
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    weights = {
        name.removesuffix("_scale").removesuffix(".weight"): numbers(tensors[name.removesuffix("_scale")], scales)
        for name, scales in tensors.items()
        if name.endswith(".weight_scale")
    }
    assert len(weights) == 7 * 3
    runner = start(folder, max_model_len=64)
    seen = record(runner)
    want = all_logits(runner, IDS, [len(IDS)])
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    model = LlamaForCausalLM(WIDE.config(**config)).eval()
    model.load_state_dict(tensors, strict=False)
    inputs = iter(seen)
    follow(model, weights, inputs, round_)
    with torch.inference_mode():
        got = model(torch.tensor([IDS])).logits[0]
    assert next(inputs, None) is None
    torch.testing.assert_close(want, got, atol=1e-4, rtol=1e-4)
