"""NVIDIA's ModelOpt: `quant_method` modelopt and modelopt_fp4, or a file hf_quant_config.json.

`quant_algo` says how a matrix [outputs, inputs] is stored:

- FP8: `weight` F8_E4M3 [outputs, inputs], `weight_scale` and `input_scale`, one number each.
- FP8_PER_CHANNEL_PER_TOKEN: as FP8, with `weight_scale` [outputs] and no scale of inputs.
- FP8_PB_WO: `weight` as FP8, `weight_scale` [outputs / 128, 1, inputs / 128, 1]; inputs keep 16 bits.
- NVFP4, W4A16_NVFP4: `weight` U8 [outputs, inputs / 2] of codes in e2m1, the first of two in the lower half,
  `weight_scale` F8_E4M3 [outputs, inputs / 16], and `weight_scale_2`, one number that multiplies as well. NVFP4's
  `input_scale` is for products of inputs in 4 bits; here they keep 16 bits.
- null: no matrix is quantized; the file has scales of the KV cache alone.
- MIXED_PRECISION: `quantized_layers` has the algorithm of each matrix by name; others are not quantized.

`exclude_modules` and `ignore` have globs of matrices that are left out. `k_proj.k_scale` and `v_proj.v_scale` are
scales of the KV cache, which `kv.scales` reads. Documented in ModelOpt ("Unified HuggingFace checkpoint",
modelopt/torch/export), and vLLM ("NVIDIA TensorRT Model Optimizer").
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.checkpoint_names import bare
from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.fp8 import Fp8Scheme
from blockyard.services.gpu_worker.quantization.formats.layouts.either import quantized_or_not
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import SCALES, check_scales
from blockyard.services.gpu_worker.quantization.kept import table4_a16, w8a16
from blockyard.services.gpu_worker.quantization.kept.eight_bits import E4M3
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.names import (
    NamePatterns,
    NamesOfFile,
    SettingsByName,
    fused_names,
    is_left_out,
)
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.floats import FP8, FP8_BLOCKS, FP8_ROWS, MIXED, NV_GROUP, ModelOptSettings
from blockyard.shared.quantization.reading import read

SCALE, SECOND_SCALE, INPUT_SCALE = "weight_scale", "weight_scale_2", "input_scale"
BLOCK = 128  # rows and columns of FP8_PB_WO
CODES, BYTES = frozenset({E4M3}), frozenset({torch.uint8})
NOTE = "nvfp4 weights, whose inputs keep 16 bits"


class ModelOptScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], device: torch.device) -> None:
        """Raises ConfigError for settings that it does not know."""
        self._settings = settings = read(said, ModelOptSettings)
        self._left_out = NamePatterns(settings.left_out)
        self._by_name = SettingsByName({bare(name): one for name, one in settings.quantized_layers.items()})
        self._fp8 = {
            FP8: Fp8Scheme({"activation_scheme": "static"}, device),
            FP8_ROWS: Fp8Scheme({"activation_scheme": "dynamic"}, device),
        }

    def patterns(self) -> list[NamesOfFile]:
        return [self._left_out, self._by_name]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if self._left_out.match(matrix.name) or is_left_out(matrix.name):
            return None
        algorithm = self._algorithm(matrix.name)
        if algorithm is None:
            return None
        if algorithm in self._fp8:
            return self._fp8[algorithm].stored(matrix)
        if algorithm == FP8_BLOCKS:
            form: KeptForm = W8A16(E4M3, BLOCK)
            tensors, to_kept, note = _tensors_of_blocks(matrix), partial(_kept_blocks, matrix), ""
        else:
            form = Table4A16(E2M1, NV_GROUP, E4M3, row_scales=True)
            tensors, to_kept, note = _tensors_of_nvfp4(matrix), partial(_kept_nvfp4, matrix), NOTE
        stored = StoredMatrix(form=form, tensors=tensors, to_kept=to_kept, note=note)
        return quantized_or_not(matrix, stored) if matrix.plain else stored

    def _algorithm(self, name: str) -> str | None:
        """Finds a matrix's algorithm. None: not quantized. A name may mean all matrices in a part of a model."""
        if self._settings.quant_algo != MIXED:
            return self._settings.quant_algo
        short = bare(name)
        while short:
            found = self._by_name.find(short, *fused_names(short))
            if found is not None:
                return found.quant_algo
            short = short.rpartition(".")[0]
        return None


def build(said: Mapping[str, Any], table: WeightTable) -> ModelOptScheme:
    return ModelOptScheme(said, table.device)


def _tensors_of_nvfp4(matrix: Matrix) -> dict[str, StoredTensor]:
    """Raises ConfigError for inputs that are no whole groups."""
    if matrix.inputs % NV_GROUP:
        raise ConfigError(f"{matrix.name}: {matrix.inputs} inputs are no multiple of {NV_GROUP}, the groups of nvfp4")
    outputs, inputs = matrix.outputs, matrix.inputs
    return {
        WEIGHT: matrix.stored(WEIGHT, (outputs, inputs // 2), BYTES),
        SCALE: matrix.stored(SCALE, (outputs, inputs // NV_GROUP), CODES),
        SECOND_SCALE: matrix.stored(SECOND_SCALE, (), FLOATS, other_shapes=((1,),)),
        INPUT_SCALE: matrix.stored(INPUT_SCALE, (), FLOATS, other_shapes=((1,),), optional=True),
    }


def _kept_nvfp4(matrix: Matrix, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    check_scales(matrix.tensor(SCALE), tensors[SCALE])
    whole = check_scales(matrix.tensor(SECOND_SCALE), tensors[SECOND_SCALE])
    return {
        table4_a16.CODES: tensors[WEIGHT],
        table4_a16.SCALES: tensors[SCALE],
        table4_a16.ROW_SCALES: whole.flatten().expand(matrix.outputs),
    }


def _tensors_of_blocks(matrix: Matrix) -> dict[str, StoredTensor]:
    rows, columns = -(-matrix.outputs // BLOCK), -(-matrix.inputs // BLOCK)
    return {
        WEIGHT: matrix.stored(WEIGHT, (matrix.outputs, matrix.inputs), CODES),
        SCALE: matrix.stored(SCALE, (rows, 1, columns, 1), SCALES, other_shapes=((rows, columns),)),
    }


def _kept_blocks(matrix: Matrix, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = check_scales(matrix.tensor(SCALE), tensors[SCALE]).view(-(-matrix.outputs // BLOCK), -1)
    return {w8a16.CODES: tensors[WEIGHT], w8a16.SCALES: scales.repeat_interleave(BLOCK, 0)[: matrix.outputs]}
