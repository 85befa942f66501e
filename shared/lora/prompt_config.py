"""Reads `adapter_config.json` of PEFT's prompt adapters: how many vectors of which width are before each prompt."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import CONFIG_FILE
from blockyard.shared.lora.adapter_folder import read_config_bytes

# whose saved tensor is the inputs of the virtual tokens; the encoder of P-tuning is not in the file
SERVED = ("PROMPT_TUNING", "P_TUNING")
# fields that only training reads
_TRAINING = frozenset(
    [
        *("auto_mapping", "base_model_name_or_path", "encoder_dropout", "encoder_hidden_size", "encoder_num_layers"),
        *("encoder_reparameterization_type", "inference_mode", "num_attention_heads", "num_layers", "peft_type"),
        *("peft_version", "prompt_tuning_init", "prompt_tuning_init_text", "revision", "runtime_config", "task_type"),
        *("tokenizer_kwargs", "tokenizer_name_or_path"),
    ]
)


class PromptAdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of adapter_config.json that its vectors depend on."""

    num_virtual_tokens: Annotated[int, msgspec.Meta(ge=1)]
    token_dim: int | None = None
    num_transformer_submodules: int | None = None
    modules_to_save: list[str] | None = None


class _TypeField(msgspec.Struct):
    peft_type: str = "LORA"


def is_prompt_adapter(folder: Path) -> bool:
    """Whether the config in a folder is one of a prompt adapter. False also if it cannot be read."""
    try:
        return msgspec.json.decode(read_config_bytes(folder), type=_TypeField).peft_type in SERVED
    except (AdapterError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def read_prompt_config(folder: Path) -> tuple[bytes, PromptAdapterConfig, list[str]]:
    """Returns the bytes of a folder's config, what they say, and notes. Raises AdapterError for what is not served."""
    content = read_config_bytes(folder)
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object: {e}") from e
    kind = fields.get("peft_type")
    if kind not in SERVED:
        raise AdapterError(
            f"{CONFIG_FILE}: peft_type {kind!r} is no prompt adapter that is served; {', '.join(SERVED)} are"
        )
    try:
        config = msgspec.convert(fields, PromptAdapterConfig)
    except msgspec.ValidationError as e:
        raise AdapterError(f"{CONFIG_FILE}: {e}") from e
    if config.num_transformer_submodules not in (None, 1):
        given = config.num_transformer_submodules
        raise AdapterError(f"{CONFIG_FILE}: num_transformer_submodules {given} is not served: decoders have 1")
    if config.modules_to_save:
        raise AdapterError(
            f"{CONFIG_FILE}: modules_to_save {config.modules_to_save} is not served with a prompt adapter"
        )
    unknown = sorted(fields.keys() - {*PromptAdapterConfig.__struct_fields__, *_TRAINING})
    return content, config, [f"{CONFIG_FILE}: {', '.join(unknown)}: not known, and not read"] if unknown else []
