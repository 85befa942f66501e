"""Tiny checkpoints whose matrices are in one kept form, for each form. They need no package of a format."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fp8_files
import modelopt_files
import quark_files
import torch
from gptq_files import Layout, write_gptq
from quantized_checkpoint import Checkpoints
from torch import Tensor

from blockyard.shared.quantization.files import read_quantization

INT8_ROWS = quark_files.INT8 | {"qscheme": "per_channel"}
round_to_int8 = partial(quark_files.round_inputs, torch.int8, False)


def write_modelopt(folder: Path, model: str = "llama") -> Checkpoints:
    return modelopt_files.write_modelopt(folder, model, {"": "NVFP4"}, exclude_modules=["lm_head"])


def write_modelopt_in_config(folder: Path, model: str) -> Checkpoints:
    """As a start reads it, to which the launcher gives what hf_quant_config.json says."""
    made = write_modelopt(folder, model)
    modelopt_files.add_settings(made, json.dumps({"quantization_config": read_quantization(made.packed, {}).said}))
    return made


def write_int8(folder: Path, model: str = "llama") -> Checkpoints:
    return quark_files.write_quark(folder, model, INT8_ROWS, INT8_ROWS | {"is_dynamic": True})


def write_fp8(folder: Path, model: str = "llama", method: str = "fp8") -> Checkpoints:
    return fp8_files.write_fp8(folder, model, "row", method=method)


@dataclass(frozen=True, slots=True)
class FormSample:
    """Checkpoints whose matrices are in one form, if they are quantized."""

    write: Callable[[Path, str], Checkpoints]  # of a model by its name
    round_inputs: Callable[[Tensor], Tensor] | None = None


FORMS = {
    "W4A16": FormSample(lambda folder, model: write_gptq(folder, model, Layout(group=32, sym=False))),
    "W8A16": FormSample(lambda folder, model: write_gptq(folder, model, Layout(bits=8, group=-1))),
    "Table4A16": FormSample(write_modelopt_in_config),
    "Fp8W8A8": FormSample(write_fp8, fp8_files.round_rows),
    "Int8W8A8": FormSample(write_int8, round_to_int8),
}
# forms with tensors of their own: an order of the inputs, scales of blocks, one number for all inputs
MORE_FORMS = {
    "W4A16, act order": FormSample(lambda folder, model: write_gptq(folder, model, Layout(group=32, act_order=True))),
    "Fp8W8A8, blocks": FormSample(
        lambda folder, model: fp8_files.write_fp8(folder, model, "block"), fp8_files.round_groups
    ),
    "Int8W8A8, static": FormSample(
        lambda folder, model: quark_files.write_quark(
            folder, model, INT8_ROWS, quark_files.INT8 | {"qscheme": "per_tensor"}
        ),
        partial(quark_files.round_inputs, torch.int8, True),
    ),
}
