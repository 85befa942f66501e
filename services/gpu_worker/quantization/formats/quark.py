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

import msgspec
import torch

from blockyard.services.gpu_worker.quantization.formats.layouts import stored_codes
from blockyard.services.gpu_worker.quantization.formats.layouts.settings import read
from blockyard.services.gpu_worker.quantization.formats.layouts.stored_codes import MX_GROUP, CodeScheme, Inputs
from blockyard.services.gpu_worker.quantization.kept.eight_bits import has_products
from blockyard.services.gpu_worker.quantization.names import HEAD, NamePatterns, is_left_out
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.errors import ConfigError

FP8, INT8, FP4 = "fp8_e4m3", "int8", "fp4"
PER_TENSOR, PER_CHANNEL, PER_GROUP = "per_tensor", "per_channel", "per_group"
KEPT_INPUTS = "inputs that the file would quantize stay 16 bits"


class TensorConfig(msgspec.Struct, frozen=True):
    """How tensors are quantized. The fields that count."""

    dtype: str
    qscheme: str = PER_TENSOR
    group_size: int | None = None
    symmetric: bool | None = None
    is_dynamic: bool | None = None
    scale_format: str | None = None


class LayerConfig(msgspec.Struct, frozen=True):
    weight: TensorConfig | None = None
    input_tensors: TensorConfig | None = None


class QuarkSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    global_quant_config: LayerConfig = LayerConfig()
    layer_quant_config: dict[str, LayerConfig] = {}
    layer_type_quant_config: dict[str, Any] = {}
    exclude: list[str] = []

    def __post_init__(self) -> None:
        if self.layer_type_quant_config:
            raise ValueError("layer_type_quant_config: settings by the class of a layer are not read")


class QuarkScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], device: torch.device, note: Callable[[str, str], None]) -> None:
        """Arguments and errors: see `CompressedTensorsScheme`."""
        self._settings, self._note = read(said, QuarkSettings), note
        self._has_products = has_products(device)
        self._excluded = NamePatterns(self._settings.exclude)
        self._layers = {key: NamePatterns([key]) for key in self._settings.layer_quant_config}
        for config in (self._settings.global_quant_config, *self._settings.layer_quant_config.values()):
            _check(config)

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


def _check(config: LayerConfig) -> None:
    """Raises ConfigError for weights that no layout has."""
    weight = config.weight
    if weight is None:
        return
    where = "quantization_config: weight:"
    if weight.dtype not in (FP8, INT8, FP4):
        raise ConfigError(f"{where} dtype {weight.dtype!r} is none of {FP8}, {INT8}, {FP4}")
    if weight.dtype == FP4:
        if weight.qscheme != PER_GROUP or weight.group_size != MX_GROUP or weight.scale_format != "e8m0":
            raise ConfigError(f"{where} {FP4} is read in groups of {MX_GROUP} with scales in e8m0 (mxfp4)")
    elif weight.qscheme not in (PER_TENSOR, PER_CHANNEL) or weight.symmetric is False:
        raise ConfigError(f"{where} {weight.dtype} is read with qscheme {PER_TENSOR} or {PER_CHANNEL}, symmetric")
