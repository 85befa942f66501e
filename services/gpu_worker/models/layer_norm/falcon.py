"""Falcon 7B, 40B and 180B: attention and MLP side by side, LayerNorm, joined projections, few or one K/V head."""

from typing import Any

import msgspec

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionOptions, AttentionShape, JoinedQKV
from blockyard.services.gpu_worker.layers.decoder_layers import DecoderLayer, ParallelLayer, PreNormLayer
from blockyard.services.gpu_worker.layers.embedding import Head, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.layers.norm import LayerNorm
from blockyard.services.gpu_worker.layers.rope_parameters import read_rope
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError


class FalconConfig(msgspec.Struct, frozen=True):
    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    num_kv_heads: bounds.Heads | None = None
    ffn_hidden_size: bounds.Width | None = None  # None: 4 * hidden_size
    num_ln_in_parallel_attn: int | None = None  # None: 2 in the new architecture
    new_decoder_architecture: bool = False
    multi_query: bool = True  # all q heads share one K/V head, in the old architecture
    parallel_attn: bool = True
    alibi: bool = False
    bias: bool = False
    activation: str = "gelu"
    layer_norm_epsilon: bounds.Epsilon = 1e-5
    max_position_embeddings: bounds.Positions = 2048
    tie_word_embeddings: bool = True

    @property
    def kv_heads(self) -> int:
        if self.new_decoder_architecture:
            return self.num_kv_heads or self.num_attention_heads
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def has_two_norms(self) -> bool:
        return self.new_decoder_architecture and self.num_ln_in_parallel_attn in (None, 2)


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config, FalconConfig)
    shape = _shape(fields)
    rope = read_rope(config, fields.max_position_embeddings)
    rotary = RotaryEmbedding(rope, shape.head_dim, fields.max_position_embeddings)
    layers, num_layers, hidden = LinearLayers(table, config), fields.num_hidden_layers, fields.hidden_size
    embedding = TokenEmbedding(layers, "transformer.word_embeddings", fields.vocab_size, hidden)
    return Decoder(
        table,
        ModelShape(vocab_size=fields.vocab_size, max_positions=rotary.max_positions, attention=(shape,) * num_layers),
        embedding=embedding,
        make_layer=lambda number: _layer(fields, layers, number, shape, rotary.rotary_dim),
        norm=LayerNorm(table, "transformer.ln_f", hidden, eps=fields.layer_norm_epsilon),
        head=Head(embedding.make_head(layers, fields.tie_word_embeddings)),
        rotations=LayerRotations((rotary,) * num_layers),
    )


def _shape(fields: FalconConfig) -> AttentionShape:
    """Returns the attention shape of all layers. Raises ConfigError for models that are not supported."""
    if fields.alibi:
        raise ConfigError("config.json: alibi: no attention kernel here adds a bias by distance (ALiBi)")
    if fields.new_decoder_architecture and not fields.parallel_attn:
        raise ConfigError("config.json: parallel_attn false contradicts new_decoder_architecture")
    heads, kv_heads = fields.num_attention_heads, fields.kv_heads
    if fields.hidden_size % (2 * heads):
        raise ConfigError(
            f"config.json: num_attention_heads: {heads} heads do not divide hidden_size {fields.hidden_size} in even "
            "parts"
        )
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} heads cannot share {kv_heads} key/value heads (num_kv_heads)")
    size = fields.hidden_size // heads
    return AttentionShape(num_heads=heads, kv_heads=kv_heads, head_dim=size, rules=ScoreRules(scale=size**-0.5))


def _layer(
    fields: FalconConfig, layers: LinearLayers, number: int, shape: AttentionShape, rotary_dim: int
) -> DecoderLayer:
    prefix, hidden, bias = f"transformer.h.{number}", fields.hidden_size, fields.bias

    def make_norm(name: str) -> LayerNorm:
        return LayerNorm(layers.table, f"{prefix}.{name}", hidden, eps=fields.layer_norm_epsilon)

    by_group = fields.new_decoder_architecture or not fields.multi_query
    options = AttentionOptions(
        qkv=JoinedQKV(name="query_key_value", bias=bias, by_group=by_group),
        out_name="dense",
        out_bias=bias,
        halves_dim=rotary_dim,
    )
    attention = Attention(layers, f"{prefix}.self_attention", number, hidden, shape, options)
    up, down, inner = f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h", fields.ffn_hidden_size or 4 * hidden
    mlp = MLP(layers, up, down, hidden, inner, read_activation("activation", fields.activation), bias=bias)
    if not fields.parallel_attn:
        return PreNormLayer(make_norm("input_layernorm"), attention, make_norm("post_attention_layernorm"), mlp)
    if fields.has_two_norms:
        return ParallelLayer(make_norm("ln_attn"), attention, mlp, make_norm("ln_mlp"))
    return ParallelLayer(make_norm("input_layernorm"), attention, mlp)
