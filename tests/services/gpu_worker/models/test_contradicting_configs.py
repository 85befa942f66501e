"""A config.json that contradicts itself is refused with the field, by every family that reads the field."""

from typing import Any

import pytest
import torch
from tiny_models import MODELS, Tiny

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import ConfigError

ONE_LAYER = ["full_attention"]
WRONG: dict[str, tuple[Any, ...]] = {
    "activation": ("nonsense",),
    "activation_function": ("nonsense",),
    "attention_chunk_size": (-1,),
    "decoder_sparse_step": (0,),
    "first_k_dense_replace": (-1,),
    "head_dim": (0, 15),
    "hidden_act": ("nonsense",),
    "hidden_activation": ("nonsense",),
    "hidden_size": (0,),
    "interleave_moe_layer_step": (0,),
    "intermediate_size": (0,),
    "kv_lora_rank": (0, 7),
    "layer_norm_eps": (-1.0,),
    "layer_types": (ONE_LAYER, ONE_LAYER * 99, ["nonsense"] * 3),
    "max_position_embeddings": (0,),
    "mlp_layer_types": (["dense"], ["sparse"] * 99),
    "moe_intermediate_size": (0,),
    "moe_layers": ([-1],),
    "n_embd": (0, 63),
    "n_group": (3,),
    "n_head": (0, 5),
    "n_positions": (0,),
    "n_routed_experts": (0,),
    "no_rope_layers": ([1],),
    "norm_eps": (-1.0,),
    "norm_epsilon": (-1.0,),
    "num_attention_heads": (0, 5),
    "num_experts": (0,),
    "num_experts_per_tok": (0, 99),
    "num_hidden_layers": (0,),
    "num_key_value_heads": (0, 3),
    "num_kv_heads": (0, 3),
    "num_local_experts": (0,),
    "num_mtp_modules": (-1,),
    "num_nextn_predict_layers": (-1,),
    "partial_rotary_factor": (0.03,),
    "qk_nope_head_dim": (0,),
    "qk_rope_head_dim": (0, 7),
    "rms_norm_eps": (-1.0,),
    "sliding_window": (-1,),
    "top_k_experts": (0, 99),
    "topk_group": (0, 9),
    "v_head_dim": (0,),
    "vocab_size": (0,),
}
OTHER_NAMES = {"num_local_experts": "num_experts"}  # Qwen's
LATENT = {("head_dim", 0), ("head_dim", 15), ("num_attention_heads", 5)}
LATENT |= {("num_key_value_heads", 0), ("num_key_value_heads", 3)}  # K and V are made from the latent for all heads
NOT_READ: dict[str, set[tuple[str, Any]]] = {  # fields in what transformers writes that the family does not read
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "FalconForCausalLM": {("num_kv_heads", 0), ("num_kv_heads", 3)},  # only with new_decoder_architecture
    "Glm4MoeLiteForCausalLM": LATENT,
    "Glm4MoeForCausalLM": {("num_experts", 0)},
    "OlmoeForCausalLM": {("moe_intermediate_size", 0)},
}


def build(config: dict[str, Any]) -> None:
    find_family(config)(config, WeightTable(torch.float32, torch.device("meta")))


def changed(config: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    """Also among the parameters of rotations, where some versions of transformers write the field too."""
    rope = config.get("rope_parameters") or {}
    return config | {field: value} | ({"rope_parameters": rope | {field: value}} if field in rope else {})


@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_contradictions_are_refused_with_the_field(tiny: Tiny) -> None:
    config = text_part(tiny.config_json())
    build(config)
    accepted, unnamed = set(), []
    for field, values in WRONG.items():
        for value in values if field in config else ():
            try:
                build(changed(config, field, value))
            except ConfigError as e:
                line = str(e)
                if not (field in line or OTHER_NAMES.get(field, field) in line) or "\n" in line:
                    unnamed.append(f"{field} {value}: {line}")
            else:
                accepted.add((field, str(value)))
    assert not unnamed
    allowed = {(field, str(value)) for field, value in NOT_READ.get(tiny.architecture, ())}
    assert accepted <= allowed
