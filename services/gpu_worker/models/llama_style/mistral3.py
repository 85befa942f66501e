"""Mistral Small 3.1 and later, and Ministral 3, as models that also see: their text part, without pictures."""

from typing import Any

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style import ministral3, mistral
from blockyard.shared.errors import ConfigError

TEXT_PARTS = {"mistral": mistral.build, "ministral3": ministral3.build}  # by `model_type` of text_config


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    kind = str(config.get("model_type"))
    if kind not in TEXT_PARTS:
        raise ConfigError(f"config.json: text_config.model_type {kind!r} is not supported; {', '.join(TEXT_PARTS)} are")
    table.leave_out("vision_tower.", "multi_modal_projector.")
    return TEXT_PARTS[kind](config, table)
