"""Qwen 3 mixtures of experts: Qwen 3 with experts in the place of the MLP of most layers."""

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import FeedForward
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.layers.norm import head_rms_norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LlamaConfig,
    LlamaVariant,
    biased,
    build_llama,
    llama_mlp,
)
from blockyard.services.gpu_worker.models.llama_style.qwen2 import WindowConfig
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, make_routing
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}
OTHER_NAMES = {"num_local_experts": "num_experts"}


class QwenMoeConfig(msgspec.Struct, frozen=True):
    """The fields that Qwen 2 and 3 share. Families have their defaults."""

    num_experts_per_tok: bounds.Experts
    moe_intermediate_size: bounds.Width
    num_experts: bounds.Experts
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, msgspec.Meta(ge=1)] = 1  # every so many layers have experts
    mlp_only_layers: list[int] | None = None  # layers without experts

    def has_experts(self, layer: int) -> bool:
        return layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0

    def routing(self) -> Routing:
        return make_routing("num_experts", self.num_experts, self.num_experts_per_tok, renormalize=self.norm_topk_prob)


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields = msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)
    moe = parse(config, QwenMoeConfig)
    check_silu(fields.hidden_act)
    routing = moe.routing()

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> FeedForward:
        if not moe.has_experts(layer):
            return llama_mlp(layers, fields, prefix)
        return RoutedExperts(
            layers.make([part(f"{prefix}.mlp.gate", routing.num_experts)], fields.hidden_size),
            separate_experts(
                layers, f"{prefix}.mlp.experts", routing.num_experts, fields.hidden_size, moe.moe_intermediate_size
            ),
            routing,
        )

    attention = replace(biased(fields.attention_bias), qk_norm=head_rms_norm(fields.rms_norm_eps))
    windows = (parse(config, WindowConfig).window,) * fields.num_hidden_layers
    return build_llama(config, fields, table, LlamaVariant(attention=attention, windows=windows, make_mlp=make_mlp))
