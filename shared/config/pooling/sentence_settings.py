"""Reads what sentence-transformers says of texts: their length, prompts that go before them, and similarity."""

import enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from blockyard.shared.config.services.tokenizer import MessageSettings
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import read_json

T = TypeVar("T", bound=msgspec.Struct)

# the same file by the names of older releases, one for each class of transformers
LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
SETTINGS_FILE = "config_sentence_transformers.json"
TOKENIZER_FILE = "tokenizer_config.json"  # which has the length since sentence-transformers 6
_NO_VALUES = ("restore_suffix", "truncation", "max_length", "padding")  # of the package, not of templates
_NO_LIMIT = int(1e20)  # a model_max_length above it, transformers' LARGE_INTEGER, means that there is none


class Similarity(enum.StrEnum):
    """The function that compares two vectors."""

    COSINE = "cosine"
    DOT = "dot"
    EUCLIDEAN = "euclidean"  # the distance, negative
    MANHATTAN = "manhattan"  # the distance, negative


class SentenceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of a folder without these files."""

    max_seq_length: int | None = None  # tokens of a text; None: the model's
    do_lower_case: bool = False
    prompts: dict[str, str] = {}  # by name
    default_prompt_name: str | None = None
    similarity: Similarity = Similarity.COSINE
    activation_fn: str | None = None  # a path of Python, that a CrossEncoder applies to logits
    truncate_dim: int | None = None  # numbers that are kept of a vector; None: all
    messages: MessageSettings = MessageSettings()


class _Modality(msgspec.Struct, frozen=True):
    format: str = "auto"  # of messages: flat, structured


class _ProcessingKwargs(msgspec.Struct, frozen=True):
    chat_template: dict[str, Any] = {}


class _LengthFile(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None
    do_lower_case: bool = False
    modality_config: dict[str, _Modality] = {}
    processing_kwargs: _ProcessingKwargs = _ProcessingKwargs()


class _TokenizerFile(msgspec.Struct, frozen=True):
    model_max_length: int | float | None = None


class _SettingsFile(msgspec.Struct, frozen=True):
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: Similarity | None = None
    activation_fn: str | None = None
    truncate_dim: int | None = None


def read_settings(folder: Path, transformer_folder: str = "") -> SentenceSettings:
    """Returns the settings of a model's folder. transformer_folder: of its Transformer module.

    Raises ConfigError for files that are wrong.
    """
    settings = _read(folder / SETTINGS_FILE, _SettingsFile)
    prompts = settings.prompts or {}
    default = settings.default_prompt_name
    if default is not None and default not in prompts:
        named = ", ".join(prompts) or "it has none"
        raise ConfigError(
            f"{folder / SETTINGS_FILE}: default_prompt_name {default!r} is not the name of a prompt: {named}"
        )
    if settings.truncate_dim is not None and settings.truncate_dim < 1:
        raise ConfigError(f"{folder / SETTINGS_FILE}: truncate_dim {settings.truncate_dim} is not a width")
    base = folder / transformer_folder
    path = next((path for name in LENGTH_FILES if (path := base / name).is_file()), base / LENGTH_FILES[0])
    length = _read(path, _LengthFile)
    most = length.max_seq_length
    if most is not None and most < 1:
        raise ConfigError(f"{path}: max_seq_length {most} is not a number of tokens")
    return SentenceSettings(
        max_seq_length=_length_of_tokenizer(base / TOKENIZER_FILE) if most is None else most,
        do_lower_case=length.do_lower_case,
        prompts=prompts,
        default_prompt_name=default,
        similarity=settings.similarity_fn_name or Similarity.COSINE,
        activation_fn=settings.activation_fn,
        truncate_dim=settings.truncate_dim,
        messages=_messages(length),
    )


def _messages(file: _LengthFile) -> MessageSettings:
    """sentence-transformers writes every text as a message if the Transformer has this modality."""
    found = file.modality_config.get("message")
    values = {name: value for name, value in file.processing_kwargs.chat_template.items() if name not in _NO_VALUES}
    has_parts = found is not None and found.format == "structured"
    return MessageSettings(writes_texts=found is not None, has_parts=has_parts, values=values)


def _length_of_tokenizer(path: Path) -> int | None:
    """Returns model_max_length, where sentence-transformers cuts, and vLLM with pooling models. None: no limit."""
    most = _read(path, _TokenizerFile).model_max_length
    if most is None or most > _NO_LIMIT:
        return None
    if most < 1:
        raise ConfigError(f"{path}: model_max_length {most} is not a number of tokens")
    return int(most)


def _read(path: Path, kind: type[T]) -> T:
    if not path.is_file():
        return kind()
    try:
        return msgspec.convert(read_json(path), kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}") from e
