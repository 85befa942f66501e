"""The formats of quantized checkpoints by the name in config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from blockyard.services.gpu_worker.quantization.dense import UnquantizedFormat
from blockyard.services.gpu_worker.quantization.method import Format
from blockyard.services.gpu_worker.quantization.mxfp4 import Mxfp4Format
from blockyard.shared.quantization import quantization_method

# `quant_method` -> what makes the format of quantization_config; the names are those of `shared.quantization`
FORMATS: dict[str | None, Callable[[Mapping[str, Any]], Format]] = {
    None: lambda said: UnquantizedFormat(),
    "mxfp4": lambda said: Mxfp4Format(),
}


def find_format(config: Mapping[str, Any]) -> Format:
    """Returns the format that config.json says. Raises ConfigError for an unknown one."""
    return FORMATS[quantization_method(config)](config.get("quantization_config") or {})
