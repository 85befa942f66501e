"""The type of the KV cache and its scales: --kv-cache-dtype and what goes with it."""

from pathlib import Path

from blockyard.shared.config.given import Values
from blockyard.shared.errors import ConfigError


def check(values: Values) -> None:
    """Raises ConfigError."""
    dtype, path = values.get("kv-cache-dtype", str), values.maybe("quantization-param-path", str)
    calculated = values.get("calculate-kv-scales", bool)
    for name, given in (("quantization-param-path", path), ("calculate-kv-scales", calculated)):
        if given and dtype == "auto":
            raise ConfigError(
                f"{values.where(name)}: scales are of a KV cache in 8 bits; --kv-cache-dtype fp8 asks for one"
            )
    if path and calculated:
        raise ConfigError(f"{values.where('calculate-kv-scales')}: --quantization-param-path gives them already")
    if path and not Path(path).is_file():
        raise ConfigError(f"{values.where('quantization-param-path')}: {path} is not a file")
    if dtype != "auto" and values.get("device", str) == "cpu":
        raise ConfigError(f"{values.where('kv-cache-dtype')} {dtype}: 8 bits need a GPU; on CPU leave it at auto")


def scope(values: Values) -> str:
    """In words, what stored KV depends on."""
    words = [values.get("kv-cache-dtype", str), values.maybe("quantization-param-path", str) or ""]
    if values.get("calculate-kv-scales", bool):
        words.append("calculated")
    return " ".join(word for word in words if word)
