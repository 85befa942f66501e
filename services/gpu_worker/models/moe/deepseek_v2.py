"""DeepSeek V2, V2-Lite and V2.5: as V3, but experts are chosen by a softmax, and a group by its best expert."""

from typing import Any

from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.moe.deepseek_v3 import DeepseekConfig, build_deepseek
from blockyard.services.gpu_worker.models.moe.moe_config import make_routing
from blockyard.shared.errors import ConfigError

DEFAULTS = {  # of fields that config.json may omit
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
OTHER_NAMES = {"num_experts": "n_routed_experts"}
METHODS = ("greedy", "group_limited_greedy")


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields = parse(config, DeepseekConfig)
    if fields.topk_method not in METHODS:
        raise ConfigError(f"config.json: topk_method {fields.topk_method} is not supported, {', '.join(METHODS)} are")
    in_groups = fields.topk_method == "group_limited_greedy"
    routing = make_routing(
        "n_routed_experts",
        fields.n_routed_experts,
        fields.num_experts_per_tok,
        renormalize=False,  # as transformers, whatever norm_topk_prob says: it is false in all releases
        scale=fields.routed_scaling_factor,
        groups=(fields.n_group or 1) if in_groups else 1,
        top_groups=(fields.topk_group or 1) if in_groups else 1,
    )
    return build_deepseek(config, fields, table, routing, has_choice_bias=False)
