"""A tiny checkpoint of every format, by the `quant_method` of its file."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import awq_files
import bitsandbytes_files
import compressed_files
import fp8_files
import hqq_files
import torch
from auto_round_files import write_auto_round
from dequantized_files import aqlm, qqq, squeezellm, write_all
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from gptq_files import Layout, named, write_gptq
from kept_forms import round_to_int8, write_fp8, write_int8, write_modelopt
from mxfp4_files import write_mxfp4
from packed_words import in_marlin_order
from quantized_checkpoint import Checkpoints, is_projection, write
from tiny_models import BY_NAME
from torch import Tensor

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


AQLM = {"out_group_size": 2, "in_group_size": 4, "num_codebooks": 2, "nbits_per_codebook": 8}

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
    "deepspeedfp": Sample(fp8_files.write_deepspeed, fp8_files.round_rows),
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
