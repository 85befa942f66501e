"""GPT-NeoX and Pythia: partial rotation, LayerNorm and biases, attention and MLP side by side."""

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
from blockyard.services.gpu_worker.layers.rope_parameters import DEFAULT_THETA, Share, read_rope
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

MASK = ".attention.bias"  # of early checkpoints, no weight


class GPTNeoXConfig(msgspec.Struct, frozen=True):
    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    intermediate_size: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    hidden_act: str = "gelu"
    layer_norm_eps: bounds.Epsilon = 1e-5
    max_position_embeddings: bounds.Positions = 2048
    rotary_emb_base: bounds.Base = DEFAULT_THETA
    rotary_pct: Share = 0.25  # of each head that is rotated
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config, GPTNeoXConfig)
    heads, num_layers, hidden = fields.num_attention_heads, fields.num_hidden_layers, fields.hidden_size
    if hidden % heads:
        raise ConfigError(f"config.json: num_attention_heads: {heads} heads do not divide hidden_size {hidden}")
    size, longest = hidden // heads, fields.max_position_embeddings
    shape = AttentionShape(num_heads=heads, kv_heads=heads, head_dim=size, rules=ScoreRules(scale=size**-0.5))
    own = {"rope_theta": fields.rotary_emb_base, "partial_rotary_factor": fields.rotary_pct}
    rope = read_rope(config | own, longest, rotates_part=True)
    rotary = RotaryEmbedding(rope, size, longest)
    table.ignore_suffix(MASK)
    table.alias("embed_out.weight", "lm_head.weight")
    layers = LinearLayers(table, config)
    embedding = TokenEmbedding(layers, "gpt_neox.embed_in", fields.vocab_size, hidden)
    return Decoder(
        table,
        ModelShape(vocab_size=fields.vocab_size, max_positions=rotary.max_positions, attention=(shape,) * num_layers),
        embedding=embedding,
        make_layer=lambda number: _layer(fields, layers, number, shape, rotary.rotary_dim),
        norm=LayerNorm(table, "gpt_neox.final_layer_norm", hidden, eps=fields.layer_norm_eps),
        head=Head(embedding.make_head(layers, fields.tie_word_embeddings)),
        rotations=LayerRotations((rotary,) * num_layers),
    )


def _layer(
    fields: GPTNeoXConfig, layers: LinearLayers, number: int, shape: AttentionShape, rotary_dim: int
) -> DecoderLayer:
    prefix, hidden, bias = f"gpt_neox.layers.{number}", fields.hidden_size, fields.attention_bias
    options = AttentionOptions(
        qkv=JoinedQKV(name="query_key_value", bias=bias, by_group=True),
        out_name="dense",
        out_bias=bias,
        halves_dim=rotary_dim,
    )
    norm1 = LayerNorm(layers.table, f"{prefix}.input_layernorm", hidden, eps=fields.layer_norm_eps)
    attention = Attention(layers, f"{prefix}.attention", number, hidden, shape, options)
    norm2 = LayerNorm(layers.table, f"{prefix}.post_attention_layernorm", hidden, eps=fields.layer_norm_eps)
    up, down, inner = f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h", fields.intermediate_size
    mlp = MLP(layers, up, down, hidden, inner, read_activation("hidden_act", fields.hidden_act), bias=True)
    if fields.use_parallel_residual:
        return ParallelLayer(norm1, attention, mlp, norm2)
    return PreNormLayer(norm1, attention, norm2, mlp)
