"""The JSON files of a model folder, and the settings that follow from them."""

from pathlib import Path
from typing import Any

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.lora import AdapterSource
from blockyard.shared.config.services.worker import DUMMY_FORMATS
from blockyard.shared.config.text_part import text_patch
from blockyard.shared.config.worker_fields import on_gpu
from blockyard.shared.context_length import longest_sequence, too_long
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import merge_patch, read_json
from blockyard.shared.messages import SamplingDefaults
from blockyard.shared.quantization.method import check_quantization, quantized_at_load, settle_quantization
from blockyard.shared.quantization.reading import CONFIG, KEY
from blockyard.shared.quantization.table import GGUF, NAMES

UNSAID_WINDOWS = {  # sliding window in tokens, for a config.json without one
    "Cohere2ForCausalLM": 4096,
    "Gemma2ForCausalLM": 4096,
    "Gemma3ForCausalLM": 4096,
    "Gemma3ForConditionalGeneration": 4096,
    "Gemma4ForCausalLM": 512,
    "Gemma4ForConditionalGeneration": 512,
    "MistralForCausalLM": 4096,
    "Olmo3ForCausalLM": 4096,
}
NAMES_OF_QUANTIZATION = ("bitsandbytes", GGUF)  # values of --load-format that mean --quantization
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder on this machine. `config` and `generation` are its JSON files as they are."""

    name: str  # as given by the user
    path: Path
    tokenizer_path: Path
    config: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    revision: str = ""
    quantization: dict[str, Any] = {}  # quantization_config by another file than config.json
    quantization_file: str = CONFIG  # that has it
    quantization_notes: list[str] = []  # see `quantization_files`
    # name of a tensor that only quantized weights have; "": there is none; None: it is not known
    quantized_tensor: str | None = None
    config_path: Path | None = None  # folder of config.json, if it is not `path`
    modules_path: Path | None = None  # folder of modules.json, if it is not `path`
    adapters: list[AdapterSource] = []  # that a server begins with, with the paths of their folders

    @property
    def modules_folder(self) -> Path:
        return self.modules_path or self.path


def model_length(config: dict[str, Any]) -> int | None:
    """Returns the context length in config.json."""
    return _first_int(config, _LENGTH_KEYS)


def num_experts(config: dict[str, Any]) -> int | None:
    """Returns the number of experts of a layer. None: the model has no experts."""
    return _first_int(_of_text(config), _EXPERTS_KEYS) or None


def tokens_of_an_expert(config: dict[str, Any], num_tokens: int) -> float | None:
    """Returns how many of `num_tokens` an expert gets with even routing. None: the model has no experts."""
    experts, top_k = num_experts(config), _first_int(_of_text(config), _TOP_K_KEYS)
    return num_tokens * top_k / experts if experts and top_k else None


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _first_int(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def config_overrides(values: Values) -> dict[str, Any]:
    """Returns the values merged over config.json: --hf-overrides, with `text_config` as part of all, the RoPE flags,
    --disable-sliding-window.

    They are merged by RFC 7396: objects key by key, and None removes a key. A disabled window is 0 instead of removed,
    because a family may have a default window.
    """
    overrides = text_patch(values.maybe("hf-overrides", dict) or {})
    for flag, key in (("rope-scaling", "rope_scaling"), ("rope-theta", "rope_theta")):
        if values[flag] is not None:
            overrides[key] = values[flag]
    if values.get("disable-sliding-window", bool):
        overrides["sliding_window"] = 0
    return overrides


def quantized_overrides(values: Values, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns `config_overrides` with quantization_config, where another file than config.json or --quantization says
    it. Raises ConfigError if weights cannot be read so."""
    overrides = config_overrides(values)
    if checkpoint.quantization:
        given = overrides.get(KEY, {})
        overrides[KEY] = None if given is None else merge_patch(checkpoint.quantization, given)
    merged = merge_patch(checkpoint.config, overrides)
    asked = asked_quantization(values)
    check_quantization(merged, checkpoint.quantization_file)
    if _is_of_16_bits(checkpoint):
        overrides |= quantized_at_load(merged)
    if asked is None:
        return overrides
    on_gpu_refused = NAMES[asked.lower()].refused_on_gpu
    if on_gpu_refused and on_gpu(values):
        raise ConfigError(f"{values.where('quantization')} {asked}: {on_gpu_refused}")
    return overrides | settle_quantization(asked, merged, values.where(quantization_flag(values)))


def quantization_flag(values: Values) -> str:
    """Returns the flag that names a quantization, if one does."""
    return "quantization" if values["quantization"] is not None else "load-format"


def _is_of_16_bits(checkpoint: Checkpoint) -> bool:
    """Whether weights are not quantized in the files. Where it is not known, config.json and its like say it."""
    if checkpoint.quantized_tensor is not None:
        return checkpoint.quantized_tensor == ""
    return not checkpoint.quantization and not checkpoint.config.get(KEY)


def asked_quantization(values: Values) -> str | None:
    """Returns the name of --quantization, or of --load-format, where it is one. Raises ConfigError for two names."""
    asked, loaded = values.maybe("quantization", str), values.get("load-format", str)
    if loaded not in NAMES_OF_QUANTIZATION:
        return asked
    if asked not in (None, loaded):
        both = f"{values.where('load-format')} {loaded} and {values.where('quantization')} {asked}"
        raise ConfigError(f"{both}: give one of them")
    return loaded


def file_format(values: Values) -> str:
    """Returns which weight files are loaded: --load-format, unless it is the name of a quantization."""
    loaded, asked = values.get("load-format", str), values.maybe("quantization", str)
    if GGUF in (loaded, (asked or "").lower()) and loaded not in DUMMY_FORMATS:
        return GGUF
    return "auto" if loaded in NAMES_OF_QUANTIZATION else loaded


def said_quantization(values: Values, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns quantization_config of the checkpoint's files with --hf-overrides; {}: it is not quantized."""
    merged = merge_patch({KEY: checkpoint.quantization} | checkpoint.config, config_overrides(values))
    said = merged.get(KEY)
    return said if isinstance(said, dict) else {}


def asked_length(values: Values) -> int | None:
    """Returns the number of --max-model-len, or None if it is unset or `auto`."""
    asked = values["max-model-len"]
    return asked if isinstance(asked, int) else None


def context_limit(values: Values, config: dict[str, Any]) -> int | None:
    """Returns --max-model-len, with --disable-sliding-window limited to the window. None: the model's length."""
    asked = asked_length(values)
    unsaid = UNSAID_WINDOWS.get(next(iter(config.get("architectures") or []), ""))
    window = config.get("sliding_window", unsaid) if config.get("use_sliding_window", True) else None
    if not values.get("disable-sliding-window", bool) or not isinstance(window, int):
        return asked
    if asked is not None and asked > window:
        raise ConfigError(
            f"{values.where('max-model-len')} {asked}: at most the sliding window, {window}, with "
            "--disable-sliding-window"
        )
    return asked or min(window, model_length(config) or window)


def check_length(values: Values, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if --max-model-len is longer than config.json, with the values of flags, allows."""
    asked, impl = asked_length(values), values.get("model-impl", str)
    most = longest_sequence(checkpoint.config, config_overrides(values), impl)
    if asked is not None and most is not None and asked > most:
        raise ConfigError(too_long(values.where("max-model-len"), asked, most))


def sampling_defaults(values: Values, generation: dict[str, Any]) -> SamplingDefaults:
    """Returns defaults of sampling parameters by --generation-config and --override-generation-config.

    `generation` is the model's own generation_config.json, used with `auto`. Raises ConfigError.
    """
    source = values.maybe("generation-config", str)
    found: dict[str, Any] = {}
    if source == "auto":
        found = generation
    elif source is not None and source != "vllm":
        path = Path(source)
        found = read_json(path / "generation_config.json" if path.is_dir() else path)
    known = {field.name: field.type for field in msgspec.structs.fields(SamplingDefaults)}
    settings = {key: value for key, value in found.items() if key in known and value is not None}
    override = values.maybe("override-generation-config", dict) or {}
    unknown = [key for key in override if key not in known]
    where = values.where("override-generation-config")
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is none of {', '.join(known)}")
    values_of: dict[str, Any] = {}
    for key, value in (settings | override).items():
        try:
            values_of[key] = msgspec.convert(value, known[key])
        except msgspec.ValidationError as e:
            raise ConfigError(f"{where if override else 'generation_config.json'}: {e} - at `$.{key}`") from e
    return SamplingDefaults(**values_of)


def chat_template(values: Values) -> str | None:
    """Returns the template's text from --chat-template, a file or the text itself."""
    given = values.maybe("chat-template", str)
    if given is None or "{{" in given or "{%" in given:
        return given
    path = Path(given)
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "is not UTF-8"
        raise ConfigError(f"{values.where('chat-template')} {given}: {reason}") from e
