"""The formats of quantized checkpoints by their modules' names in `shared.quantization`."""

from collections.abc import Callable, Mapping
from typing import Any

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.dense import UnquantizedFormat
from blockyard.services.gpu_worker.quantization.formats.aqlm import AqlmScheme
from blockyard.services.gpu_worker.quantization.formats.auto_round import AutoRoundScheme
from blockyard.services.gpu_worker.quantization.formats.awq import AwqScheme
from blockyard.services.gpu_worker.quantization.formats.bitsandbytes import BitsAndBytesScheme
from blockyard.services.gpu_worker.quantization.formats.compressed_tensors import CompressedTensorsScheme
from blockyard.services.gpu_worker.quantization.formats.experts_int8 import ExpertsInt8Scheme
from blockyard.services.gpu_worker.quantization.formats.fp8 import Fp8Scheme
from blockyard.services.gpu_worker.quantization.formats.gguf import GgufScheme
from blockyard.services.gpu_worker.quantization.formats.gptq import GptqScheme
from blockyard.services.gpu_worker.quantization.formats.hqq import HqqScheme
from blockyard.services.gpu_worker.quantization.formats.modelopt import ModelOptScheme
from blockyard.services.gpu_worker.quantization.formats.mxfp4 import Mxfp4Scheme
from blockyard.services.gpu_worker.quantization.formats.qqq import QqqScheme
from blockyard.services.gpu_worker.quantization.formats.quark import QuarkScheme
from blockyard.services.gpu_worker.quantization.formats.squeezellm import SqueezeLlmScheme
from blockyard.services.gpu_worker.quantization.method import Format
from blockyard.services.gpu_worker.quantization.quantized_format import QuantizedFormat
from blockyard.shared.quantization import quantization_method

# module in `formats/` -> the function that makes the format of quantization_config
FORMATS: dict[str | None, Callable[[Mapping[str, Any], WeightTable], Format]] = {
    None: lambda said, table: UnquantizedFormat(),
    "auto_round": lambda said, table: QuantizedFormat(AutoRoundScheme(said, table.dtype), table),
    "awq": lambda said, table: QuantizedFormat(AwqScheme(said, table.dtype), table),
    "compressed_tensors": lambda said, table: QuantizedFormat(
        CompressedTensorsScheme(said, table.dtype, table.device, table.note), table
    ),
    "experts_int8": lambda said, table: QuantizedFormat(ExpertsInt8Scheme(said), table),
    "fp8": lambda said, table: QuantizedFormat(Fp8Scheme(said, table.device), table),
    "gptq": lambda said, table: QuantizedFormat(GptqScheme(said, table.dtype), table),
    "bitsandbytes": lambda said, table: QuantizedFormat(BitsAndBytesScheme(said, table.dtype), table),
    "aqlm": lambda said, table: QuantizedFormat(AqlmScheme(said, table.dtype), table),
    "gguf": lambda said, table: QuantizedFormat(GgufScheme(table.dtype), table),
    "qqq": lambda said, table: QuantizedFormat(QqqScheme(said, table.dtype), table),
    "squeezellm": lambda said, table: QuantizedFormat(SqueezeLlmScheme(said, table.dtype), table),
    "hqq": lambda said, table: QuantizedFormat(HqqScheme(said, table.dtype), table),
    "modelopt": lambda said, table: QuantizedFormat(ModelOptScheme(said, table.device), table),
    "mxfp4": lambda said, table: QuantizedFormat(Mxfp4Scheme(said), table),
    "quark": lambda said, table: QuantizedFormat(QuarkScheme(said, table.device, table.note), table),
}


def find_format(config: Mapping[str, Any], table: WeightTable) -> Format:
    """Returns the format that config.json says. Raises ConfigError for an unknown one, or settings it does not know."""
    method = quantization_method(config)
    return FORMATS[None if method is None else method.module](config.get("quantization_config") or {}, table)
