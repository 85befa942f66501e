"""Granite 3 and 4, dense: Llama with factors on embeddings, attention scores, residual and logits."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, biased, build_llama
from blockyard.shared.config import model_bounds as bounds


class GraniteConfig(msgspec.Struct, frozen=True):
    embedding_multiplier: bounds.Scale = 1.0
    logits_scaling: bounds.Scale = 1.0  # logits are divided by it
    residual_multiplier: bounds.Scale = 1.0  # of the output of each sublayer
    attention_multiplier: bounds.Scale = 1.0  # of scores


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields, variant = granite_variant(config)
    return build_llama(config, fields, table, variant)


def granite_variant(config: dict[str, Any]) -> tuple[LlamaConfig, LlamaVariant]:
    """The fields and the variant of Llama.

    The residual is kept divided by `residual_multiplier`: then sublayers are added to it as they are, which fused
    kernels do. Every reader of the residual normalises it, so that only the epsilon of the norms has to follow.
    """
    fields, own = parse(config, LlamaConfig), parse(config, GraniteConfig)
    share = own.residual_multiplier
    variant = LlamaVariant(
        attention=biased(fields.attention_bias),
        scale=own.attention_multiplier,
        embedding_factor=own.embedding_multiplier / share,
        scales_vectors=True,
        logits_factor=1.0 / own.logits_scaling,
    )
    return msgspec.structs.replace(fields, rms_norm_eps=fields.rms_norm_eps / share**2), variant
