"""Mistral Small 3.1 and later, and Ministral 3, as models that also see: their text part, without pictures."""

from typing import Any

from blockyard.services.gpu_worker.loading.hf_config import with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style import ministral3, mistral
from blockyard.shared.errors import ConfigError

WHOLE = "mistral3"  # `model_type` of the whole model, where text_config has none
DEFAULTS = {"tie_word_embeddings": True}  # of the whole model
TEXT_PARTS = {"mistral": mistral.build, "ministral3": ministral3.build}  # by `model_type` of text_config


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    kind = "mistral" if config.get("model_type") == WHOLE else str(config.get("model_type"))
    if kind not in TEXT_PARTS:
        raise ConfigError(f"config.json: text_config.model_type {kind!r} is not supported; {', '.join(TEXT_PARTS)} are")
    table.leave_out("vision_tower.", "multi_modal_projector.")
    return TEXT_PARTS[kind](config, table)
