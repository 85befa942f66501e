"""Weights in e4m3: `quant_method` fp8 and fbgemm_fp8, and 16-bit checkpoints that are quantized while they load.

A matrix [outputs, inputs] is stored as

- `weight` F8_E4M3 [outputs, inputs],
- `weight_scale`, one number, or [outputs] or [outputs, 1]; or with `weight_block_size` [rows, columns] in the config
  `weight_scale_inv` [ceil(outputs / rows), ceil(inputs / columns)], which multiplies as well,
- `input_scale`, one number, if `activation_scheme` is static.

In files that transformers wrote, `weight_scale` is `weight_scale_inv`, too, and `input_scale` is `activation_scale`.

Documented in transformers (integrations/finegrained_fp8.py, quantizers of fbgemm_fp8), in the README of DeepSeek-V3's
weights (README_WEIGHTS.md) and in vLLM's "FP8 W8A8". Of fbgemm_fp8, `activation_scale_ub` bounds the scales of inputs:
a row counts as having at most that absolute value.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.either import quantized_or_not
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import SCALES, check_scales
from blockyard.services.gpu_worker.quantization.kept import fp8_w8a8
from blockyard.services.gpu_worker.quantization.kept.eight_bits import (
    E4M3,
    FLOOR,
    MOST,
    expand,
    has_products,
    scaled_to_e4m3,
    to_e4m3,
)
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.names import NamePatterns, is_left_out, is_left_out_at_load
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix, ToKept
from blockyard.shared.quantization.floats import Fp8Settings
from blockyard.shared.quantization.reading import read

SCALE, BLOCK_SCALE, INPUT_SCALE = "weight_scale", "weight_scale_inv", "input_scale"
OTHER_INPUT_SCALE = "activation_scale"  # transformers' name
CODES = frozenset({E4M3})
OF_DEEPSPEED = "deepspeedfp weights, which are read as fp8 with scales of rows: inputs are rounded, too"
NO_PRODUCTS = "fp8 weights, whose inputs keep 16 bits because this GPU has no fp8 products"


class Fp8Scheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], device: torch.device) -> None:
        """Raises ConfigError for settings that it does not know."""
        self._settings = read(said, Fp8Settings)
        self._left_out = NamePatterns([*self._settings.modules_to_not_convert, *self._settings.ignored_layers])
        self._form, self._has_products = self._find_form(), has_products(device)

    def _find_form(self) -> Fp8W8A8:
        said = self._settings
        group = None if said.weight_block_size is None else said.weight_block_size[1]
        static = said.activation_scheme == "static" and group is None
        return Fp8W8A8(group, static, said.activation_scale_ub)

    @property
    def form(self) -> KeptForm:
        return self._form if self._has_products else W8A16(E4M3, self._form.group)

    @property
    def _note(self) -> str:
        if not self._has_products:
            return NO_PRODUCTS
        return OF_DEEPSPEED if self._settings.is_deepspeed else ""

    def patterns(self) -> list[NamePatterns]:
        return [self._left_out]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if self._left_out.match(matrix.name) or is_left_out(matrix.name):
            return None
        shape = matrix.stored_shape
        if self._settings.is_made_at_load:
            if matrix.plain or is_left_out_at_load(matrix.name):
                return None
            tensors = {WEIGHT: matrix.stored(WEIGHT, shape, FLOATS)}
            return StoredMatrix(form=self.form, tensors=tensors, to_kept=self._round(matrix), note=self._note)
        scale, tensors = self._stored_scale(matrix), {}
        if self._settings.activation_scheme == "static":
            is_used = self._form.static and self._has_products and not matrix.plain
            tensors[INPUT_SCALE] = matrix.stored(
                *(INPUT_SCALE, (), FLOATS),
                other_shapes=((1,),),
                optional=not is_used,
                other_keys=(OTHER_INPUT_SCALE,),
            )
        tensors |= {WEIGHT: matrix.stored(WEIGHT, shape, CODES), SCALE: scale}
        to_kept = partial(self._to_kept, matrix, scale.name)
        stored = StoredMatrix(form=self.form, tensors=tensors, to_kept=to_kept, note=self._note)
        return quantized_or_not(matrix, stored) if matrix.plain else stored

    def _stored_scale(self, matrix: Matrix) -> StoredTensor:
        block = self._settings.weight_block_size
        if block is None:
            shapes = ((1,), (matrix.outputs,), _turned(matrix, (matrix.outputs, 1)))
            return matrix.stored(SCALE, (), SCALES, other_shapes=shapes, other_keys=(BLOCK_SCALE,))
        rows, columns = -(-matrix.outputs // block[0]), -(-matrix.inputs // block[1])
        return matrix.stored(BLOCK_SCALE, _turned(matrix, (rows, columns)), SCALES, other_keys=(SCALE,))

    def _round(self, matrix: Matrix) -> ToKept:
        block = self._settings.weight_block_size

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            weight = _turn(matrix, tensors[WEIGHT])
            codes, scales = to_e4m3(weight) if block is None else round_blocks(weight, block)
            return {fp8_w8a8.CODES: codes, fp8_w8a8.SCALES: scales}

        return to_kept

    def _to_kept(self, matrix: Matrix, scale_name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales, block = check_scales(scale_name, tensors[SCALE]), self._settings.weight_block_size
        if block is None:
            scales = scales.flatten().expand(matrix.outputs)
        else:
            scales = _turn(matrix, scales).repeat_interleave(block[0], 0)[: matrix.outputs]
        made = {fp8_w8a8.CODES: _turn(matrix, tensors[WEIGHT]), fp8_w8a8.SCALES: scales}
        if self._form.static and INPUT_SCALE in tensors:
            made[fp8_w8a8.INPUT_SCALE] = check_scales(matrix.tensor(INPUT_SCALE), tensors[INPUT_SCALE])
        return made


def build(said: Mapping[str, Any], table: WeightTable) -> Fp8Scheme:
    return Fp8Scheme(said, table.device)


def _turned(matrix: Matrix, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if matrix.transposed else shape


def _turn(matrix: Matrix, stored: Tensor) -> Tensor:
    return stored.mT if matrix.transposed else stored


def round_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes, and scales of rows and groups of inputs, equal in the rows of a block."""
    rows, columns = block
    (outputs, inputs), largest = weight.shape, weight.float().abs()
    padded = F.pad(largest, (0, -inputs % columns, 0, -outputs % rows))
    scales = (
        torch.unflatten(torch.unflatten(padded, 1, (-1, columns)), 0, (-1, rows))
        .amax((1, 3))
        .div(MOST)
        .clamp_(min=FLOOR)
    )
    scales = scales.repeat_interleave(rows, 0)[:outputs]
    return scaled_to_e4m3(weight, expand(scales, columns, inputs)), scales
