"""The settings of each method, by the module of its format in `gpu_worker.quantization.formats`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from blockyard.shared.quantization import CONFIG, GGUF, KEY, quantization_method
from blockyard.shared.quantization_settings.floats import Fp8Settings, ModelOptSettings, Mxfp4Settings
from blockyard.shared.quantization_settings.groups import CompressedSettings, QuarkSettings
from blockyard.shared.quantization_settings.integers import (
    AqlmSettings,
    AutoRoundSettings,
    AwqSettings,
    BitsAndBytesSettings,
    ExpertsInt8Settings,
    GptqSettings,
    HqqSettings,
    QqqSettings,
    SqueezeLlmSettings,
)
from blockyard.shared.quantization_settings.reading import read


class NoSettings(msgspec.Struct, frozen=True):
    """Of a method whose files say all."""


SETTINGS: dict[str, type[msgspec.Struct]] = {
    "aqlm": AqlmSettings,
    "auto_round": AutoRoundSettings,
    "awq": AwqSettings,
    "bitsandbytes": BitsAndBytesSettings,
    "compressed_tensors": CompressedSettings,
    "experts_int8": ExpertsInt8Settings,
    "fp8": Fp8Settings,
    GGUF: NoSettings,
    "gptq": GptqSettings,
    "hqq": HqqSettings,
    "modelopt": ModelOptSettings,
    "mxfp4": Mxfp4Settings,
    "qqq": QqqSettings,
    "quark": QuarkSettings,
    "squeezellm": SqueezeLlmSettings,
}


def check(config: Mapping[str, Any], file: str = CONFIG) -> None:
    """Raises ConfigError naming file, field and value for a quantization_config that no format reads.

    config: config.json. file: that has its quantization_config.
    """
    method = quantization_method(config, file)
    if method is not None:
        read_settings(config[KEY], method.module, file)


def read_settings(said: Mapping[str, Any], module: str, file: str = CONFIG) -> msgspec.Struct:
    """Returns the settings of a format. Raises ConfigError."""
    return read(said, SETTINGS[module], file)
