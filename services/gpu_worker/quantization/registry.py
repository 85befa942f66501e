"""Finds the format of a checkpoint by the line of its method in `shared.quantization.table`."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.dense import UnquantizedFormat
from blockyard.services.gpu_worker.quantization.method import Format
from blockyard.services.gpu_worker.quantization.quantized_format import QuantizedFormat
from blockyard.services.gpu_worker.quantization.scheme import Scheme
from blockyard.shared.quantization.method import quantization_method
from blockyard.shared.quantization.reading import KEY

Build = Callable[[Mapping[str, Any], WeightTable], Scheme]  # arguments: quantization_config, weight table


def find_format(config: Mapping[str, Any], table: WeightTable) -> Format:
    """Returns the format that config.json says. Raises ConfigError for an unknown one, or settings it does not know."""
    method = quantization_method(config)
    if method is None:
        return UnquantizedFormat()
    # The table holds names, as that of architectures does: the launcher reads it too and must not import torch.
    build: Build = resolve_name(f"{__package__}.formats.{method.module}:build")
    return QuantizedFormat(build(config[KEY], table), table, method.name)
