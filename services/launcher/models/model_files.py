"""Finds a model's files: a local folder, a name on the hub or the demo model. Checks config.json."""

import os
import re
from pathlib import Path
from typing import Any

import msgspec

import blockyard.shared
from blockyard.services.launcher.models.stored_weights import check_files, check_is_said, find_quantized
from blockyard.shared.architectures import describe_refusal, find_architecture, may_be_in_transformers
from blockyard.shared.config import adapters
from blockyard.shared.config.checkpoint import (
    Checkpoint,
    config_overrides,
    file_format,
    quantization_flag,
    quantized_overrides,
    said_quantization,
)
from blockyard.shared.config.model_bounds import check_numbers
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.pooling.sentence_modules import transformer_folder
from blockyard.shared.config.services.lora import AdapterSource
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import AdapterError, ConfigError
from blockyard.shared.json_objects import read_json
from blockyard.shared.lora.adapter_folder import check_folder
from blockyard.shared.lora.prompt_config import read_prompt_config
from blockyard.shared.process.home import home_variables
from blockyard.shared.quantization.files import read_quantization

DEMO = "demo"
HUB_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")  # variables that say where the hub's cache is
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def demo_folder() -> Path:
    return Path(blockyard.shared.__file__).parent / "demo_model"


def find(values: Values, weights: bool = True) -> Checkpoint:
    """Returns the local files of the model and tokenizer that the flags name, downloading them if needed.

    Without `weights` only the tokenizer's files are needed. Raises ConfigError.
    """
    name = values.get("model", str)
    revision = values.maybe("revision", str)
    path = modules_path = _folder(name, revision, values, weights)
    path = path / transformer_folder(path)
    tokenizer = values.maybe("tokenizer", str)
    tokenizer_revision = values.maybe("tokenizer-revision", str)
    if tokenizer is None and tokenizer_revision in (None, revision):
        tokenizer_path = path
    else:
        tokenizer_path = _folder(tokenizer or name, tokenizer_revision or revision, values, weights=False)
    config_folder, config_name = path, values.maybe("hf-config-path", str)
    if config_name is not None:
        config_folder = _folder(config_name, None, values, weights=False)
    generation = path / "generation_config.json"
    config = _config(config_folder, values, needed=weights)
    quantization = read_quantization(path, config)
    load_format, ignored = file_format(values), [str(pattern) for pattern in values.get("ignore-patterns", list)]
    checkpoint = Checkpoint(
        name=name,
        path=path,
        tokenizer_path=tokenizer_path,
        config=config,
        quantization=quantization.said,
        quantization_file=quantization.file,
        quantization_notes=quantization.notes,
        quantized_tensor=find_quantized(path, load_format, ignored) if weights else None,
        generation=read_json(generation) if generation.is_file() else {},
        revision=revision or "",
        config_path=None if config_name is None else config_folder,
        modules_path=None if path == modules_path else modules_path,
        adapters=find_adapters(values) if weights else [],
    )
    check_numbers(checkpoint.config | config_overrides(values), config_folder / "config.json")
    if weights and values["worker-cls"] != "mock":
        check_architecture(checkpoint, config_overrides(values), str(values["model-impl"]))
        if not said_quantization(values, checkpoint):
            check_is_said(name, checkpoint.quantized_tensor)
        quantized_overrides(values, checkpoint)
        check_files(path, load_format, values.where(quantization_flag(values)), ignored)
    return checkpoint


def find_adapters(values: Values) -> list[AdapterSource]:
    """Returns the adapters that a server begins with, and checks their configs. Raises ConfigError."""
    found, max_rank = list[AdapterSource](), values.get("max-lora-rank", int)
    for source in adapters.sources(values):
        folder = _folder(source.path, None, values, weights=True, what=f"adapter {source.name}: path")
        changes_experts = False
        try:
            if source.is_prompt:
                read_prompt_config(folder)
            else:
                changes_experts = check_folder(folder, max_rank)
        except AdapterError as e:
            raise ConfigError(f"adapter {source.name}: {folder}: {e}") from e
        found.append(msgspec.structs.replace(source, path=str(folder), has_experts=changes_experts))
    return found


def check_architecture(checkpoint: Checkpoint, overrides: dict[str, Any], model_impl: str) -> None:
    """Raises ConfigError unless config.json names an architecture that is supported, or may be by transformers."""
    config = checkpoint.config | overrides
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        path = (checkpoint.config_path or checkpoint.path) / "config.json"
        raise ConfigError(f"{path} names no architecture: it needs `architectures`")
    if find_architecture(names) is None and model_impl != "transformers" and not may_be_in_transformers(config):
        raise ConfigError(f"{checkpoint.name}: {describe_refusal(config)}")


def _config(path: Path, values: Values, needed: bool) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file() and (not needed or values["worker-cls"] == "mock"):
        return {}
    if not file.is_file():
        raise ConfigError(f"{path} has no config.json: it is not a model folder")
    return text_part(read_json(file))


def _folder(name: str, revision: str | None, values: Values, weights: bool, what: str = "model") -> Path:
    """what: begins each error, before the name."""
    if name == DEMO:
        return demo_folder()
    local = Path(name).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.exists():
        raise ConfigError(f"{what} {name}: is a file; the folder that holds it is needed")
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"{what} {name}: no such folder, and not a valid hub name")
    # huggingface_hub takes long to import: only models of the hub need it
    from blockyard.services.launcher.models import hub  # noqa: PLC0415

    return hub.download(
        name,
        revision=revision,
        folder=values.maybe("download-dir", str) or _cache_without_home(),
        load_format=file_format(values),
        ignore=[str(pattern) for pattern in values.get("ignore-patterns", list)],
        weights=weights and values["worker-cls"] != "mock",
        token=hub_token(values),
        what=what,
    )


def _cache_without_home() -> str | None:
    """Returns the hub's cache of a user without a home folder; None: where huggingface_hub has it."""
    home = home_variables().get("HOME")
    if home is None or any(name in os.environ for name in HUB_FOLDERS):
        return None
    return str(Path(home) / ".cache" / "huggingface" / "hub")


def hub_token(values: Values) -> str | bool | None:
    """Returns --hf-token: a token, True for the stored one, False for none."""
    given = values.maybe("hf-token", str)
    return given.lower() == "true" if given is not None and given.lower() in ("true", "false") else given
