"""The KV cache: its type, scales and size, by --kv-cache-dtype, --kv-cache-memory-bytes and what goes with them."""

from pathlib import Path

from blockyard.shared.config.parsed_flags import Values
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
    if values.is_given("cpu-kv-gib") and values.is_given("kv-cache-memory-bytes"):
        raise ConfigError(f"{values.where('cpu-kv-gib')}: --kv-cache-memory-bytes says how much already")
    if dtype != "auto" and values.get("device", str) == "cpu":
        raise ConfigError(f"{values.where('kv-cache-dtype')} {dtype}: 8 bits need a GPU; on CPU leave it at auto")


def notes(values: Values) -> list[str]:
    """A line if --gpu-memory-utilization is given in vain."""
    if values.maybe("kv-cache-memory-bytes", int) is None or not values.is_given("gpu-memory-utilization"):
        return []
    return [f"{values.where('gpu-memory-utilization')}: has no effect beside --kv-cache-memory-bytes"]


def scope(values: Values) -> str:
    """In words, what stored KV depends on."""
    words = [values.get("kv-cache-dtype", str), values.maybe("quantization-param-path", str) or ""]
    if values.get("calculate-kv-scales", bool):
        words.append("calculated")
    return " ".join(word for word in words if word)
