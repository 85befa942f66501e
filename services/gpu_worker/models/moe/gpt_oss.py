"""gpt-oss: sinks and biases in the attention, windows in every other layer, experts with a gate that is limited.

Checkpoints have the experts in bfloat16 or in mxfp4.
"""

from typing import Annotated, Any

import msgspec

from blockyard.kernels.moe.gates import SWIGLU_ALPHA, SWIGLU_LIMIT, Gate
from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import stacked_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.layers.rope_parameters import SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import every, read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.services.gpu_worker.models.moe.moe_config import make_routing
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

DEFAULTS = {  # of fields that config.json may omit
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150000.0,
}
OTHER_NAMES = {"num_experts": "num_local_experts"}


class GptOssConfig(msgspec.Struct, frozen=True):
    num_local_experts: bounds.Experts = 128
    num_experts_per_tok: bounds.Experts = 4
    sliding_window: bounds.Window | None = 128
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT
    hidden_act: Annotated[str, msgspec.Meta(pattern="^silu$")] = "silu"


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields, own = parse(config, LlamaConfig), parse(config, GptOssConfig)
    if (own.swiglu_alpha, own.swiglu_limit) != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise ConfigError(
            f"config.json: swiglu_alpha {own.swiglu_alpha:g} and swiglu_limit {own.swiglu_limit:g} are not supported; "
            f"{SWIGLU_ALPHA:g} and {SWIGLU_LIMIT:g} are"
        )
    num_layers, hidden, inner = fields.num_hidden_layers, fields.hidden_size, fields.intermediate_size
    routing = make_routing("num_local_experts", own.num_local_experts, own.num_experts_per_tok)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> RoutedExperts:
        mlp = f"{prefix}.mlp"
        return RoutedExperts(
            layers.make([part(f"{mlp}.router", routing.num_experts)], hidden, bias=True),
            stacked_experts(
                layers,
                f"{mlp}.experts.gate_up_proj",
                f"{mlp}.experts.down_proj",
                routing.num_experts,
                hidden,
                inner,
                transposed=True,
                in_pairs=True,
                bias=True,
            ),
            routing,
            gate=Gate.CLAMPED_SWIGLU,
        )

    types = read_layer_types(config, num_layers, every(2))
    variant = LlamaVariant(
        attention=AttentionOptions(qkv=SeparateQKV(bias=fields.attention_bias), out_bias=fields.attention_bias),
        windows=[own.sliding_window if kind == SLIDING else None for kind in types],
        has_sinks=True,
        make_mlp=make_mlp,
    )
    return build_llama(config, fields, table, variant)
