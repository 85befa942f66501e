"""Llama 2, 3 and 3.x, and what shares their architecture."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.rotary import read_rope
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder, DecoderShape
from blockyard.services.gpu_worker.models.hf_config import parse
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError


class LlamaConfig(msgspec.Struct, frozen=True):
    """The fields of config.json that matter; the defaults are transformers'."""

    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    intermediate_size: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    num_key_value_heads: bounds.Heads | None = None
    head_dim: bounds.HeadSize | None = None
    max_position_embeddings: bounds.Positions = 2048
    rms_norm_eps: bounds.Epsilon = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config, LlamaConfig)
    return Decoder(decoder_shape(fields, config), table)


def decoder_shape(fields: LlamaConfig, config: dict[str, Any]) -> DecoderShape:
    """Raises ConfigError for what the shared block does not do."""
    if fields.hidden_act != "silu":
        raise ConfigError(f"config.json: hidden_act {fields.hidden_act!r} is not supported; 'silu' is")
    kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if fields.num_attention_heads % kv_heads:
        raise ConfigError(f"config.json: {fields.num_attention_heads} heads cannot share {kv_heads} key/value heads")
    head_dim = fields.head_dim or fields.hidden_size // fields.num_attention_heads
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(
            f"config.json: hidden_size {fields.hidden_size} and num_attention_heads {fields.num_attention_heads} make "
            f"heads of {head_dim} numbers; an even number is needed"
        )
    return DecoderShape(
        vocab_size=fields.vocab_size,
        hidden=fields.hidden_size,
        inner=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=fields.max_position_embeddings,
        norm_eps=fields.rms_norm_eps,
        rope=read_rope(config, fields.max_position_embeddings),
        windows=(None,) * fields.num_hidden_layers,
        tied=fields.tie_word_embeddings,
        qkv_bias=fields.attention_bias,
        out_bias=fields.attention_bias,
        mlp_bias=fields.mlp_bias,
    )
