"""Bits per byte of the demo model with quantized weights: simulated in float32, and as the worker computes them.

A simulation gives transformers' model the rounded numbers of every linear layer, by formulas of its own or by the
package that defines a scheme, and rounds the inputs of these layers where a scheme does. Head and embedding stay as
they are.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import compressed_files
import msgspec
import torch
import torch.nn.functional as F
from bitsandbytes import functional
from fp8_files import round_rows
from model_logits import all_logits
from quantized_checkpoint import is_projection
from quark_files import round_inputs
from safetensors.torch import load_file, save_file
from tiny_models import start
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.quantize.folder import quantize
from blockyard.services.gpu_worker.quantize.rounding import Rounding
from blockyard.services.launcher.models.model_files import demo_folder

E4M3 = torch.float8_e4m3fn
HELD_OUT = Path(__file__).parents[2] / "demo_model" / "held_out.jsonl"

Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Scheme:
    weights: Round  # [outputs, inputs] to the numbers that are kept
    inputs: Round | None = None  # [..., inputs]
    written: Rounding | None = None  # by `blockyard quantize`
    at_load: Mapping[str, Any] | None = None  # quantization_config of the 16-bit checkpoint
    package: str = ""  # format of compressed-tensors; the scheme's arguments are those of `weights`

    @property
    def most(self) -> float:
        """Percentage points by which the worker may differ from the simulation."""
        return 0.1 if self.inputs is None else 0.3


def int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return torch.round(weight / scale) * scale


def fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(E4M3).float() * scale


def fp8_blocks(weight: Tensor) -> Tensor:
    """128 x 128."""
    made = torch.empty_like(weight)
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            block = weight[row : row + 128, column : column + 128]
            scale = block.abs().max() / 448
            made[row : row + 128, column : column + 128] = (block / scale).to(E4M3).float() * scale
    return made


def round_groups(x: Tensor) -> Tensor:
    return torch.cat([round_rows(one) for one in x.split(128, 1)], 1)


def four_bits(group: int, asymmetric: bool, weight: Tensor) -> Tensor:
    """Scales in bfloat16, as the file has them."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    if asymmetric:
        scale = ((high - low) / 15).bfloat16().float()
        zero = torch.round(-low / scale).clamp(0, 15)
    else:
        scale, zero = (groups.abs().amax(2, keepdim=True) / 7.5).bfloat16().float(), torch.tensor(8.0)
    return (((groups / scale).round() + zero).clamp(0, 15) - zero).mul(scale).flatten(1)


def nf4(weight: Tensor) -> Tensor:
    codes, state = functional.quantize_4bit(weight.reshape(-1, 64), blocksize=64, quant_type="nf4")
    numbers: Tensor = functional.dequantize_4bit(codes, state)
    return numbers.float().view(weight.shape)


@cache
def arguments(format_: str) -> Any:
    more = {
        compressed_files.NVFP4: {"strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3},
        compressed_files.MXFP4: {"group_size": 32, "scale_dtype": torch.uint8},
    }
    return compressed_files.scheme({"num_bits": 4, "type": "float"} | more[format_])


def of_package(format_: str, weight: Tensor) -> Tensor:
    return compressed_files.packed(format_, arguments(format_), weight)[1]


BITSANDBYTES = {"quant_method": "bitsandbytes", "from_16_bits": True}
INT8_INPUTS = partial(round_inputs, torch.int8, False)
SCHEMES = {
    "int8": Scheme(int8, at_load=BITSANDBYTES | {"load_in_8bit": True}),
    "int8, int8 inputs": Scheme(int8, INT8_INPUTS, Rounding("int8")),
    "fp8 rows, fp8 inputs": Scheme(fp8, round_rows, Rounding("fp8")),
    "fp8 blocks, fp8 inputs": Scheme(fp8_blocks, round_groups, Rounding("fp8-block")),
    "4 bits, groups of 32": Scheme(partial(four_bits, 32, False), written=Rounding("w4", 32)),
    "4 bits, groups of 128": Scheme(partial(four_bits, 128, False), written=Rounding("w4", 128)),
    "4 bits, groups of 128, zeros": Scheme(partial(four_bits, 128, True), written=Rounding("w4", 128, True)),
    "nf4": Scheme(nf4, at_load=BITSANDBYTES | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "mxfp4": Scheme(partial(of_package, compressed_files.MXFP4), package=compressed_files.MXFP4),
    "nvfp4": Scheme(partial(of_package, compressed_files.NVFP4), package=compressed_files.NVFP4),
}


class Text:
    """Held-out files as ids, and the bits that a model needs for a byte of them."""

    def __init__(self, num_files: int | None = None, most_tokens: int = 4096) -> None:
        tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
        lines = HELD_OUT.read_bytes().splitlines()[:num_files]
        self._ids = [tokenizer.encode(msgspec.json.decode(line)["text"]).ids[:most_tokens] for line in lines]
        self._bytes = sum(len(tokenizer.decode(ids).encode()) for ids in self._ids)

    def bits_per_byte(self, logits: Callable[[list[int]], Tensor]) -> float:
        """logits: of ids, [tokens, vocab_size]."""
        nats = 0.0
        for ids in self._ids:
            nats += float(F.cross_entropy(logits(ids)[:-1].float(), torch.tensor(ids[1:]), reduction="sum"))
        return nats / math.log(2) / self._bytes


def simulated(text: Text, scheme: Scheme | None) -> float:
    """None: nothing is quantized."""
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if scheme is not None and isinstance(module, nn.Linear) and is_projection(name):
            module.weight.data = scheme.weights(module.weight.data)
            if scheme.inputs is not None:
                module.register_forward_pre_hook(lambda _, given: scheme.inputs(given[0][0])[None])
    with torch.no_grad():
        return text.bits_per_byte(lambda ids: model(torch.tensor([ids])).logits[0])


def of_worker(text: Text, scheme: Scheme | None, folder: Path, dtype: str = "float32") -> tuple[float, set[str]]:
    """Returns the bits per byte, and the forms of the quantized matrices.

    folder: does not exist, or has what an earlier call has written.
    """
    source = demo_folder()
    overrides = {}
    if scheme is not None and scheme.at_load is not None:
        overrides = {"quantization_config": dict(scheme.at_load)}
    elif scheme is not None:
        source = folder
        if not folder.exists():
            _write(scheme, folder)
    runner = start(
        source, config_overrides=json.dumps(overrides), max_model_len=4096, num_gpu_blocks_override=520, dtype=dtype
    )
    methods = [linear.method for linear in runner.model.linears()]
    forms = {one.kept_form.name for one in methods if isinstance(one, KeptLinear)}
    return text.bits_per_byte(lambda ids: all_logits(runner, ids, [len(ids)])), forms


def _write(scheme: Scheme, folder: Path) -> None:
    if scheme.written is not None:
        quantize(demo_folder(), folder, scheme.written)
        return
    folder.mkdir()
    config = json.loads((demo_folder() / "config.json").read_text())
    own = arguments(scheme.package)
    quantization = compressed_files.settings(scheme.package, own, ["lm_head"])
    tensors = {}
    for name, value in load_file(demo_folder() / "model.safetensors").items():
        base = name.removesuffix(".weight")
        made = compressed_files.packed(scheme.package, own, value.float())[0] if is_projection(base) else None
        tensors |= {name: value} if made is None else {f"{base}.{key}": one.contiguous() for key, one in made.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    shutil.copyfile(demo_folder() / "tokenizer.json", folder / "tokenizer.json")
