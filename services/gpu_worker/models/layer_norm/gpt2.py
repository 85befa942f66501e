"""GPT-2: learned positions, LayerNorm and biases; checkpoints have matrices as [in, out]."""

from typing import Any

import msgspec

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionOptions, AttentionShape, JoinedQKV
from blockyard.services.gpu_worker.layers.decoder_layers import PreNormLayer
from blockyard.services.gpu_worker.layers.embedding import Head, LearnedPositions, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.layers.norm import LayerNorm
from blockyard.services.gpu_worker.layers.rotary import LayerRotations
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
MASK = ".attn.bias"  # of early checkpoints, no weight


class GPT2Config(msgspec.Struct, frozen=True):
    vocab_size: bounds.Vocabulary
    n_embd: bounds.Width
    n_layer: bounds.Layers
    n_head: bounds.Heads
    n_positions: bounds.Positions = 1024
    n_inner: bounds.Width | None = None  # None: 4 * n_embd
    activation_function: str = "gelu_new"
    layer_norm_epsilon: bounds.Epsilon = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, {}, OTHER_NAMES)
    fields = parse(config, GPT2Config)
    if fields.add_cross_attention:
        raise ConfigError("config.json: add_cross_attention is not supported: there is no encoder")
    if fields.n_embd % fields.n_head:
        raise ConfigError(f"config.json: n_head {fields.n_head} does not divide n_embd {fields.n_embd}")
    layers, hidden, shapes = LinearLayers(table, config), fields.n_embd, _shapes(fields)
    table.ignore_suffix(MASK)
    embedding = TokenEmbedding(layers, "transformer.wte", fields.vocab_size, hidden)
    return Decoder(
        table,
        ModelShape(vocab_size=fields.vocab_size, max_positions=fields.n_positions, attention=shapes),
        embedding=embedding,
        positions=LearnedPositions(table, "transformer.wpe", fields.n_positions, hidden),
        make_layer=lambda number: _layer(fields, layers, number, shapes[number]),
        norm=LayerNorm(table, "transformer.ln_f", hidden, eps=fields.layer_norm_epsilon),
        head=Head(embedding.make_head(layers, fields.tie_word_embeddings)),
        rotations=LayerRotations((None,) * fields.n_layer),
    )


def _shapes(fields: GPT2Config) -> tuple[AttentionShape, ...]:
    heads, size = fields.n_head, fields.n_embd // fields.n_head
    scale = size**-0.5 if fields.scale_attn_weights else 1.0
    layers = range(1, fields.n_layer + 1) if fields.scale_attn_by_inverse_layer_idx else (1,) * fields.n_layer
    return tuple(
        AttentionShape(num_heads=heads, kv_heads=heads, head_dim=size, rules=ScoreRules(scale=scale / divisor))
        for divisor in layers
    )


def _layer(fields: GPT2Config, layers: LinearLayers, number: int, shape: AttentionShape) -> PreNormLayer:
    prefix, hidden, eps = f"transformer.h.{number}", fields.n_embd, fields.layer_norm_epsilon
    options = AttentionOptions(
        qkv=JoinedQKV(name="c_attn", bias=True, transposed=True),
        out_name="c_proj",
        out_bias=True,
        out_transposed=True,
        halves_dim=0,
    )
    up, down, inner = f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj", fields.n_inner or 4 * hidden
    activation = read_activation("activation_function", fields.activation_function)
    return PreNormLayer(
        LayerNorm(layers.table, f"{prefix}.ln_1", hidden, eps=eps),
        Attention(layers, f"{prefix}.attn", number, hidden, shape, options),
        LayerNorm(layers.table, f"{prefix}.ln_2", hidden, eps=eps),
        MLP(layers, up, down, hidden, inner, activation, bias=True, transposed=True),
    )
