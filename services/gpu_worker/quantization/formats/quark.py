"""`quant_method` quark: fp8, int8 and mxfp4, as AMD's Quark exports them for Hugging Face.

`global_quant_config` says how weights and `input_tensors` are quantized: `dtype` (fp8_e4m3, int8, or fp4 in groups of
32 with exponents as scales), `qscheme` (per_tensor, per_channel, per_group), `symmetric`, `is_dynamic`.
`layer_quant_config` has the same by names or globs, of which the first that matches counts, and `exclude` the names of
matrices that are not quantized. Tensors are as in `stored_codes` with codes one by one: `weight`, `weight_scale`,
`input_scale`; codes of fp4 are bytes uint8 [outputs, inputs / 2] in `weight`, with scales uint8 [outputs, inputs / 32].

Documented in Quark ("Exporting to Hugging Face safetensors", "Quark's quantization_config") and vLLM ("AMD Quark").
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts import stored_codes
from blockyard.services.gpu_worker.quantization.formats.layouts.stored_codes import CodeScheme, Inputs
from blockyard.services.gpu_worker.quantization.kept.eight_bits import has_products
from blockyard.services.gpu_worker.quantization.names import HEAD, NamePatterns, is_left_out
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.quantization.groups import (
    FP4,
    FP8,
    PER_GROUP,
    LayerConfig,
    QuarkSettings,
    TensorConfig,
)
from blockyard.shared.quantization.reading import read

KEPT_INPUTS = "inputs that the file would quantize stay 16 bits"


class QuarkScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], device: torch.device, note: Callable[[str, str], None]) -> None:
        """Arguments and errors: see `CompressedTensorsScheme`."""
        self._settings, self._note = read(said, QuarkSettings), note
        self._has_products = has_products(device)
        self._excluded = NamePatterns(self._settings.exclude)
        self._layers = {key: NamePatterns([key]) for key in self._settings.layer_quant_config}

    def patterns(self) -> list[NamePatterns]:
        return [self._excluded, *self._layers.values()]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        config = self._find(matrix.name)
        if config is None or config.weight is None:
            return None
        made = self._make(matrix, config.weight, config.input_tensors)
        if config.input_tensors is not None and made.form.name not in ("Fp8W8A8", "Int8W8A8"):
            self._note(KEPT_INPUTS, matrix.name)
        return made

    def _find(self, name: str) -> LayerConfig | None:
        if self._excluded.match(name):
            return None
        for key, patterns in self._layers.items():
            if patterns.match(name):
                return self._settings.layer_quant_config[key]
        is_linear = name.rpartition(".")[2] == HEAD or not is_left_out(name)
        return self._settings.global_quant_config if is_linear else None

    def _make(self, matrix: Matrix, weight: TensorConfig, inputs: TensorConfig | None) -> StoredMatrix:
        if weight.dtype == FP4:
            return stored_codes.mxfp4(matrix, WEIGHT)
        rounded = None
        if inputs is not None and inputs.dtype == weight.dtype and inputs.qscheme != PER_GROUP:
            rounded = Inputs(static=not inputs.is_dynamic, symmetric=inputs.symmetric is not False)
        own = CodeScheme(floats=weight.dtype == FP8, inputs=rounded)
        return stored_codes.codes(matrix, own, self._has_products)


def build(said: Mapping[str, Any], table: WeightTable) -> QuarkScheme:
    return QuarkScheme(said, table.device, table.note)
