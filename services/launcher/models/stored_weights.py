"""What the weight files of a model folder are, by their names and those of their tensors: no weight is read.

A worker would find it out, too, but only after processes have started.
"""

from collections.abc import Sequence
from pathlib import Path

from blockyard.shared.errors import AdapterError, ConfigError
from blockyard.shared.json_objects import read_json
from blockyard.shared.lora.adapter_folder import read_header
from blockyard.shared.quantization.reading import KEY
from blockyard.shared.quantization.table import GGUF
from blockyard.shared.weight_files import INDEX, WHOLE, is_ignored

# last parts of names that only quantized weights have: of GPTQ and AWQ, compressed-tensors, HQQ, bitsandbytes
QUANTIZED = (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".W_q", ".SCB", ".absmax")


def find_quantized(folder: Path, load_format: str, ignored: Sequence[str]) -> str | None:
    """Returns the name of a tensor that only quantized weights have; "": there is none.

    None: it is not known, because the files are no safetensors, or the worker is to say what is wrong with them.
    """
    if load_format not in ("auto", "safetensors") or not folder.is_dir():
        return None
    names = _names(folder, ignored)
    return None if names is None else next((name for name in sorted(names) if name.endswith(QUANTIZED)), "")


def _names(folder: Path, ignored: Sequence[str]) -> set[str] | None:
    if (folder / INDEX).is_file() and not is_ignored(INDEX, ignored):
        try:
            found = read_json(folder / INDEX).get("weight_map")
        except ConfigError:
            return None
        return set(found) if isinstance(found, dict) else None
    files = [file for file in folder.glob("*.safetensors") if not is_ignored(file.name, ignored)]
    files = [file for file in files if file.name == WHOLE] or files
    try:
        return {name for file in files for name in read_header(file)} if files else None
    except AdapterError:
        return None


def check_files(folder: Path, load_format: str, where: str, ignored: Sequence[str]) -> None:
    """Raises ConfigError if GGUF is asked for and there is no such file. where: the flag that asks for it."""
    if load_format != GGUF or not folder.is_dir():
        return
    if all(is_ignored(file.name, ignored) for file in folder.glob("*.gguf")):
        raise ConfigError(f"{where} {GGUF}: {folder} has no .gguf file")


def check_is_said(model: str, quantized: str | None) -> None:
    """Raises ConfigError for quantized weights of which no file says how. quantized: see `find_quantized`."""
    if quantized:
        example = f"""--hf-overrides '{{"{KEY}": {{"quant_method": "gptq", "bits": 4, "group_size": 128}}}}'"""
        raise ConfigError(
            f"{model}: the checkpoint has quantized weights ({quantized}), and neither config.json nor a file beside "
            f"it has a {KEY}; {example} would say that they are GPTQ's"
        )
