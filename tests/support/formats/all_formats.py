"""A tiny checkpoint of every format, by the `quant_method` of its file, and of every kept form."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import awq_files
import bitsandbytes_files
import compressed_files
import fp8_files
import hqq_files
import modelopt_files
import quark_files
import torch
from auto_round_files import write_auto_round
from dequantized_files import aqlm, qqq, squeezellm, write_all
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from gptq_files import Layout, named, write_gptq
from mxfp4_files import write_mxfp4
from packed_words import in_marlin_order
from quantized_checkpoint import Checkpoints, is_projection, write
from tiny_models import BY_NAME
from torch import Tensor

from blockyard.shared.config.checkpoint import read_quantization

ROWS = {"qscheme": "per_channel"}
# every matrix has whole runs of 64 outputs
EVEN = replace(BY_NAME["llama"], fields=BY_NAME["llama"].fields | {"intermediate_size": 128, "num_key_value_heads": 4})


@dataclass(frozen=True, slots=True)
class Sample:
    write: Callable[[Path], Checkpoints]
    round_inputs: Callable[[Tensor], Tensor] | None = None  # what quantized layers multiply; None: inputs as they are


def write_marlin(folder: Path) -> Checkpoints:
    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name):
            return None
        (outputs, inputs), groups = weight.shape, weight.shape[1] // 32
        codes, scales = torch.randint(0, 16, (inputs, outputs)), (torch.rand(groups, outputs) * 0.03).half()
        words, ordered = in_marlin_order(codes, scales)
        numbers = ((codes - 8) * scales.float().repeat_interleave(32, 0)).t()
        return named(name, {"B": words, "s": ordered}), numbers

    said = {"quant_method": "marlin", "bits": 4, "group_size": 32}
    return write(folder, EVEN, store, {"config.json": {"quantization_config": said}})


def write_words(folder: Path, model: str = "llama") -> Checkpoints:
    own = compressed_files.scheme({"num_bits": 4, "group_size": 32})
    return compressed_files.write_packed(folder, model, compressed_files.PACK, own)


def write_modelopt(folder: Path, model: str = "llama") -> Checkpoints:
    return modelopt_files.write_modelopt(folder, model, {"": "NVFP4"}, exclude_modules=["lm_head"])


def write_modelopt_in_config(folder: Path, model: str) -> Checkpoints:
    """As a start reads it, to which the launcher gives what hf_quant_config.json says."""
    made = write_modelopt(folder, model)
    modelopt_files.add_settings(made, json.dumps({"quantization_config": read_quantization(made.packed, {})}))
    return made


def write_int8(folder: Path, model: str = "llama") -> Checkpoints:
    return quark_files.write_quark(folder, model, quark_files.INT8 | ROWS, quark_files.INT8 | ROWS | DYNAMIC)


def write_fp8(folder: Path, model: str = "llama", method: str = "fp8") -> Checkpoints:
    return fp8_files.write_fp8(folder, model, "row", method=method)


DYNAMIC = {"is_dynamic": True}
AQLM = {"out_group_size": 2, "in_group_size": 4, "num_codebooks": 2, "nbits_per_codebook": 8}
round_to_int8 = partial(quark_files.round_inputs, torch.int8, False)

FORMATS = {
    "aqlm": Sample(
        lambda folder: write_all(
            folder, "llama", {"quant_method": "aqlm", **AQLM}, lambda *shape: aqlm(*shape, 2, 4, 2, 8)
        )
    ),
    "auto-round": Sample(partial(write_auto_round, packing={})),
    "awq": Sample(lambda folder: awq_files.write_awq(folder, "llama")),
    "bitsandbytes": Sample(lambda folder: bitsandbytes_files.write_bnb(folder, "llama", "nf4")),
    "compressed-tensors": Sample(write_words),
    "fbgemm_fp8": Sample(partial(write_fp8, method="fbgemm_fp8"), fp8_files.round_rows),
    "fp8": Sample(write_fp8, fp8_files.round_rows),
    "gguf": Sample(lambda folder: Checkpoints(*write_gguf(folder, "qwen3", GGMLQuantizationType.Q8_0, "qwen3"))),
    "gptq": Sample(lambda folder: write_gptq(folder, "llama", Layout(sym=False))),
    "hqq": Sample(lambda folder: hqq_files.write_hqq(folder, "llama")),
    "marlin": Sample(write_marlin),
    "modelopt": Sample(write_modelopt),
    "mxfp4": Sample(write_mxfp4),
    "qqq": Sample(
        lambda folder: write_all(
            folder, EVEN, {"quant_method": "qqq", "wbits": 4, "group_size": -1}, lambda *shape: qqq(*shape, False)
        )
    ),
    "quark": Sample(write_int8, round_to_int8),
    "squeezellm": Sample(
        lambda folder: write_all(folder, "llama", {"quant_method": "squeezellm", "wbits": 4}, squeezellm)
    ),
}


@dataclass(frozen=True, slots=True)
class FormSample:
    """Checkpoints whose matrices are all kept in one form."""

    write: Callable[[Path, str], Checkpoints]  # of a model by its name
    round_inputs: Callable[[Tensor], Tensor] | None = None


FORMS = {
    "W4A16": FormSample(lambda folder, model: write_gptq(folder, model, Layout(group=32, sym=False))),
    "W8A16": FormSample(lambda folder, model: write_gptq(folder, model, Layout(bits=8, group=-1))),
    "Table4A16": FormSample(write_modelopt_in_config),
    "Fp8W8A8": FormSample(write_fp8, fp8_files.round_rows),
    "Int8W8A8": FormSample(write_int8, round_to_int8),
}
