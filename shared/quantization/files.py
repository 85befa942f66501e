"""What the JSON files of a model folder say about quantized weights, in config.json or beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import read_json
from blockyard.shared.quantization.method import quantization_method, read_settings
from blockyard.shared.quantization.reading import CONFIG, KEY, stated
from blockyard.shared.quantization.table import GGUF

OLDER_KEY = "compression_config"  # of compressed-tensors
# files beside config.json -> `quant_method`, where they do not say it
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


class QuantizationFiles(msgspec.Struct, frozen=True):
    """quantization_config of a model folder by another file than config.json, or by another key."""

    said: dict[str, Any] = {}  # {}: config.json says it, or nothing does
    file: str = CONFIG
    notes: list[str] = []  # for the start's report


def read_quantization(path: Path, config: Mapping[str, Any]) -> QuantizationFiles:
    """Reads what says how weights of a model folder are quantized, besides quantization_config of `config`.

    Older files of GPTQ, AWQ and ModelOpt are of their own, and compressed-tensors had another key. config.json counts
    before them, as in transformers and vLLM. A folder may have weights in a .gguf file alone. Raises ConfigError, also
    for two files that differ.
    """
    found = {name: _read_file(path / name, method) for name, method in _FILES.items() if (path / name).is_file()}
    if config.get(KEY):
        notes = [_describe(name, said, config[KEY]) for name, said in found.items()]
        return QuantizationFiles(notes=[f"{note}; {CONFIG} counts" for note in notes if note])
    older = config.get(OLDER_KEY)
    if isinstance(older, dict):
        return QuantizationFiles({"quant_method": "compressed-tensors"} | older)
    if found:
        (name, said), *others = found.items()
        for other, also in others:
            if difference := _describe(other, also, said, name):
                raise ConfigError(f"{path}: {difference}; only one of these files may be there")
        return QuantizationFiles(said, name)
    suffixes = {file.suffix for file in path.iterdir()} if path.is_dir() else set()
    has_gguf = ".gguf" in suffixes and not suffixes & {".safetensors", ".bin", ".pt"}
    return QuantizationFiles({"quant_method": GGUF} if has_gguf else {})


def _read_file(path: Path, method: str) -> dict[str, Any]:
    said = read_json(path)
    inner = said.get("quantization")  # ModelOpt's, beside its version
    return {"quant_method": _method_of(said, method)} | (inner if isinstance(inner, dict) else said)


def _method_of(said: Mapping[str, Any], usual: str) -> str:
    """The method of a file that does not say it: `wbits` is a word of SqueezeLLM, and with groups of QQQ."""
    if "wbits" not in said:
        return usual
    return "qqq" if "group_size" in said else "squeezellm"


def _describe(name: str, said: Mapping[str, Any], other: Any, other_name: str = CONFIG) -> str:
    """Returns in what two files differ, of the fields that both have and that count; "": in nothing, or one of them is
    wrong by itself."""
    try:
        methods = [quantization_method({KEY: one}) for one in (said, other)]
        if methods[0] is None or methods[1] is None:
            return ""
        if methods[0].module != methods[1].module:
            return f"{name} says {methods[0].name}, {other_name} {methods[1].name}"
        mine, theirs = (read_settings(one, methods[0]) for one in (said, other))
    except ConfigError:
        return ""
    for field in mine.__struct_fields__:
        values = getattr(mine, field), getattr(theirs, field)
        if field != "quant_method" and field in stated(said) and field in stated(other) and values[0] != values[1]:
            shown = [msgspec.json.encode(value).decode()[:80] for value in values]
            return f"{name} says {field} {shown[0]}, {other_name} {shown[1]}"
    return ""
