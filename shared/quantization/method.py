"""Which method a checkpoint's quantization_config names, and whether it is one that this project reads, so."""

from collections.abc import Mapping
from typing import Any

import msgspec

from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.reading import CONFIG, KEY, NoSettings, read, stated
from blockyard.shared.quantization.table import BITSANDBYTES, GGUF, NAMES, READ, TABLE, QuantizationName

VENDOR = "intel/"  # in front of auto-round in older files
_MOST_SHOWN = 80  # characters of a value


def _said_method(said: Mapping[str, Any]) -> Any:
    """The method by `quant_method`, or by what files without it have: those of ModelOpt name their producer, and older
    ones of bitsandbytes a number of bits."""
    producer, method = said.get("producer"), said.get("quant_method")
    if method is None and isinstance(producer, Mapping):
        return producer.get("name")
    if method is None and (said.get("load_in_4bit") or said.get("load_in_8bit")):
        return BITSANDBYTES
    return method


def _find_spelled(method: str) -> QuantizationName | None:
    """Files write names in any case, and with either dash."""
    spelled = method.strip().lower().removeprefix(VENDOR).replace("_", "-")
    return next((one for name, one in NAMES.items() if name.replace("_", "-") == spelled), None)


def quantization_method(config: Mapping[str, Any], file: str = CONFIG) -> QuantizationName | None:
    """Returns the method that quantization_config of config.json names. None: weights are not quantized.

    file: that has it. Raises ConfigError for a method that is refused or unknown, or not said.
    """
    said = config.get(KEY)
    if not said:
        return None
    method = _said_method(said) if isinstance(said, Mapping) else None
    found = _find_spelled(method) if isinstance(method, str) else None
    if found is not None and not found.module and found.of_16_bits is None and len(found.alias_of) == 1:
        found = NAMES[found.alias_of[0]]
    if found is not None and found.module:
        return found
    if not isinstance(said, Mapping):
        what = f"is {str(said)[:_MOST_SHOWN]!r}, and no object"
    elif method is None:
        what = "has no quant_method"
    else:
        refused = found.refused if found is not None else ""
        what = f"has quant_method {method!r}, which is {f'refused: {refused}' if refused else 'not supported'}"
    raise ConfigError(
        f"{file}: {KEY} {what}; supported: {', '.join(READ)}; without quantization: "
        f"""--hf-overrides '{{"{KEY}": null}}'"""
    )


def check_quantization(config: Mapping[str, Any], file: str = CONFIG) -> None:
    """Raises ConfigError naming file, field and value for a quantization_config that no format reads.

    config: config.json. file: that has its quantization_config.
    """
    method = quantization_method(config, file)
    if method is not None:
        read_settings(config[KEY], method, file)


def read_settings(said: Mapping[str, Any], method: QuantizationName, file: str = CONFIG) -> msgspec.Struct:
    """Returns the settings that the format of a method reads. Raises ConfigError."""
    return read(said, method.settings or NoSettings, file)


def has_fp8_kv(said: Mapping[str, Any]) -> bool:
    """Whether quantization_config says that the KV cache has 8-bit floats: compressed-tensors' `kv_cache_scheme`, that
    of AutoFP8 and AMD, which is the word static, modelopt's `kv_cache_quant_algo`. Raises ConfigError for one that no
    pool has."""
    said = stated(said)
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        words = {key: str(value).lower() for key, value in scheme.items()}
        if words.get("strategy") == "attn_head":
            raise ConfigError(f"config.json: {KEY}: kv_cache_scheme has scales of heads; one scale of a layer is read")
        return words.get("num_bits") in ("8", "8.0") and words.get("type") == "float"
    if isinstance(scheme, str) and scheme.lower() == "static":
        return str(_said_method(said)).lower() == "fp8"
    algo = said.get("kv_cache_quant_algo")
    return isinstance(algo, str) and algo.upper() == "FP8"


def quantized_at_load(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is merged over config.json of a checkpoint whose weights are not quantized, where its
    quantization_config is one with which transformers quantizes weights while it loads them: that of bitsandbytes.

    Raises what `quantization_method` raises.
    """
    method = quantization_method(config)
    if method is None or method.name != BITSANDBYTES:
        return {}
    return {KEY: {**config[KEY], "quant_method": BITSANDBYTES, "from_16_bits": True}}


def settle_quantization(asked: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what is merged over config.json for a name of --quantization: nothing, or how a 16-bit checkpoint is
    quantized while it loads.

    config: with what other files of the checkpoint say. where: the flag in errors. Raises ConfigError for a name that
    is not the checkpoint's, and for what `quantization_method` refuses.
    """
    stored = quantization_method(config)
    one = NAMES[asked.lower()]
    if stored is not None:
        if stored.name not in (one.name, *one.alias_of):
            raise ConfigError(f"{where} {asked}: the checkpoint is quantized by {stored.name}; leave the flag out")
        return {}
    if one.of_16_bits is None:
        others = (other.name for other in TABLE if other.of_16_bits is not None and other.module)
        at_load = ", ".join(name for name in others if name != GGUF)
        raise ConfigError(f"{where} {asked}: the checkpoint is not quantized; while it loads it can be by: {at_load}")
    return {KEY: {"quant_method": one.name} | dict(one.of_16_bits)}
