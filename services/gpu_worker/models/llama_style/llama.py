"""Llama 2, 3 and 3.x. `build_llama` also builds families that share Llama's names of weights and order of parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import torch

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.attention import (
    LLAMA,
    Attention,
    AttentionOptions,
    AttentionShape,
    SeparateQKV,
)
from blockyard.services.gpu_worker.layers.decoder_layers import DecoderLayer, PreNormLayer
from blockyard.services.gpu_worker.layers.embedding import Head, OutputLayer, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import FeedForward, GatedMLP
from blockyard.services.gpu_worker.layers.norm import Norm, make_rms_norm
from blockyard.services.gpu_worker.layers.rope_parameters import read_rope
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, QueryScales, RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.models.output_layers import make_decoder_output
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.pooling.output_kinds import OutputKind, first_kind
from blockyard.shared.errors import ConfigError


class LlamaConfig(msgspec.Struct, frozen=True):
    """The fields of config.json that Llama models use, with the defaults of transformers."""

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


class LayerParts(NamedTuple):
    """The parts from which a variant makes a layer."""

    layers: LinearLayers
    number: int  # of the layer
    prefix: str  # of the layer's names in checkpoints
    attention: Attention
    make_norm: Callable[[str], Norm]  # given the name after the prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaVariant:
    """How a family differs from Llama. The defaults are Llama's."""

    attention: AttentionOptions = LLAMA
    attentions: Sequence[AttentionOptions] | None = None  # of each layer; None: `attention` in all
    windows: Sequence[int | None] | None = None  # sliding window of each layer, see `ScoreRules`; None: no layer's
    chunked: bool = False  # of layers with a window, see `ScoreRules`
    both_sides: bool = False  # tokens attend to later ones, see `ScoreRules`
    scale: float | None = None  # of scores; None: 1 / sqrt(head size)
    soft_cap: float | None = None  # of scores, see `ScoreRules`
    has_sinks: bool = False  # see `ScoreRules`
    rotations: Sequence[RotaryEmbedding | QueryScales | None] | None = (
        None  # of each layer; None: of config.json, in all layers
    )
    rotates_part: bool = False  # of each head, see `read_rope`
    max_positions: int | None = None  # longest sequence; None: the shortest that a layer's rotation supports
    embedding_factor: float = 1.0
    scales_vectors: bool = False  # see `TokenEmbedding`
    logits_factor: float = 1.0
    logits_soft_cap: float | None = None
    make_norm: Callable[[WeightTable, str], Norm] | None = None  # given the name in checkpoints; None: RMSNorm
    make_mlp: Callable[[LinearLayers, int, str], FeedForward] | None = None  # given layer and prefix; None: `llama_mlp`
    make_layer: Callable[[LayerParts], DecoderLayer] | None = None  # None: norms before both sublayers


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config, LlamaConfig)
    return build_llama(config, fields, table, LlamaVariant(attention=biased(fields.attention_bias)))


def biased(bias: bool) -> AttentionOptions:
    """Llama's attention, with a bias in all four projections if `bias`."""
    return AttentionOptions(qkv=SeparateQKV(bias=bias), out_bias=bias)


def build_llama(
    config: dict[str, Any], fields: LlamaConfig, table: WeightTable, variant: LlamaVariant | None = None
) -> Decoder:
    """Builds a Llama decoder. Raises ConfigError for a config that `layers/` does not support."""
    variant = variant or LlamaVariant()
    if config.get("is_causal") is False:
        variant = _with_both_sides(variant)
    hidden, num_layers = fields.hidden_size, fields.num_hidden_layers
    shapes = _shapes(fields, variant, table)
    rotations = variant.rotations or (read_rotary(config, fields, variant.rotates_part),) * num_layers
    layers = LinearLayers(table, config)
    embedding = TokenEmbedding(
        *(layers, "model.embed_tokens", fields.vocab_size, hidden),
        factor=variant.embedding_factor,
        scales_vectors=variant.scales_vectors,
    )

    def make_norm(name: str) -> Norm:
        if variant.make_norm is not None:
            return variant.make_norm(table, name)
        return make_rms_norm(table, name, hidden, fields.rms_norm_eps)

    def make_layer(index: int) -> DecoderLayer:
        prefix, rotary, options = f"model.layers.{index}", rotations[index], variant.attention
        if variant.attentions is not None:
            options = variant.attentions[index]
        if rotary is not None and options.halves_dim is None:
            options = replace(options, halves_dim=rotary.rotary_dim)
        attention = Attention(layers, f"{prefix}.self_attn", index, hidden, shapes[index], options)
        parts = LayerParts(layers, index, prefix, attention, lambda name: make_norm(f"{prefix}.{name}"))
        return _pre_norm_layer(fields, variant, parts) if variant.make_layer is None else variant.make_layer(parts)

    lengths = [rotary.max_positions for rotary in rotations if rotary is not None]
    max_positions = variant.max_positions or min(lengths, default=fields.max_position_embeddings)
    norm = make_norm("model.norm")
    kind, num_outputs = first_kind(config), None
    if kind is OutputKind.TOKENS:
        tied = embedding.make_head(layers, fields.tie_word_embeddings)
        head: OutputLayer = Head(tied, variant.logits_factor, variant.logits_soft_cap)
    else:
        head, num_outputs = make_decoder_output(
            kind, config, layers, embedding, hidden, tied=fields.tie_word_embeddings
        )
    return Decoder(
        table,
        ModelShape(
            vocab_size=fields.vocab_size,
            max_positions=max_positions,
            attention=shapes,
            has_kv=not variant.both_sides,
            num_outputs=num_outputs,
        ),
        embedding=embedding,
        make_layer=make_layer,
        norm=norm,
        head=head,
        rotations=LayerRotations(rotations),
    )


def _with_both_sides(variant: LlamaVariant) -> LlamaVariant:
    """The same model, whose tokens attend to later ones, too: a model of vectors. In transformers a window is then of
    each side, besides the token itself. Raises ConfigError."""
    if variant.both_sides:
        return variant
    if variant.chunked or variant.has_sinks or variant.soft_cap is not None:
        raise ConfigError("config.json: is_causal false is not supported with this family's attention")
    windows = variant.windows and [None if window is None else window + 1 for window in variant.windows]
    return replace(variant, both_sides=True, windows=windows)


def _pre_norm_layer(fields: LlamaConfig, variant: LlamaVariant, parts: LayerParts) -> DecoderLayer:
    if variant.make_mlp is None:
        mlp: FeedForward = llama_mlp(parts.layers, fields, parts.prefix)
    else:
        mlp = variant.make_mlp(parts.layers, parts.number, parts.prefix)
    return PreNormLayer(
        parts.make_norm("input_layernorm"), parts.attention, parts.make_norm("post_attention_layernorm"), mlp
    )


def llama_mlp(layers: LinearLayers, fields: LlamaConfig, prefix: str, joined: str | None = None) -> GatedMLP:
    """joined: see `GatedMLP`."""
    activation = read_activation("hidden_act", fields.hidden_act)
    hidden, inner, bias = fields.hidden_size, fields.intermediate_size, fields.mlp_bias
    return GatedMLP(layers, f"{prefix}.mlp", hidden, inner, activation, bias, joined=joined)


def head_size(fields: LlamaConfig) -> int:
    """Returns the size of a head. Raises ConfigError for an odd one."""
    size = fields.head_dim or fields.hidden_size // fields.num_attention_heads
    if size < 2 or size % 2:
        raise ConfigError(
            f"config.json: hidden_size {fields.hidden_size} and num_attention_heads {fields.num_attention_heads} make "
            f"heads of {size} numbers; an even number is needed"
        )
    return size


def check_shared_heads(heads: int, kv_heads: int, kv_field: str = "num_key_value_heads", where: str = "") -> None:
    """Raises ConfigError if the query heads cannot be divided among the K/V heads. where: words about the layer."""
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: {heads} heads cannot share {kv_heads} key/value heads{where} "
            f"(num_attention_heads, {kv_field})"
        )


def read_rotary(config: dict[str, Any], fields: LlamaConfig, rotates_part: bool = False) -> RotaryEmbedding:
    """Reads the rotation of config.json. rotates_part: see `read_rope`."""
    rope = read_rope(config, fields.max_position_embeddings, rotates_part=rotates_part)
    return RotaryEmbedding(rope, head_size(fields), fields.max_position_embeddings)


def _shapes(fields: LlamaConfig, variant: LlamaVariant, table: WeightTable) -> tuple[AttentionShape, ...]:
    """Returns the attention shape of each layer. Raises ConfigError for unsupported values."""
    heads, size = fields.num_attention_heads, head_size(fields)
    kv_heads = fields.num_key_value_heads or heads
    check_shared_heads(heads, kv_heads)
    scale = size**-0.5 if variant.scale is None else variant.scale
    windows = variant.windows or (None,) * fields.num_hidden_layers

    def make(window: int | None) -> AttentionShape:
        chunked = variant.chunked and window is not None
        rules = ScoreRules(
            scale=scale,
            window=window,
            both_sides=variant.both_sides,
            chunked=chunked,
            soft_cap=variant.soft_cap,
            sinks=table.empty(heads, dtype=torch.float32) if variant.has_sinks else None,
        )
        return AttentionShape(num_heads=heads, kv_heads=kv_heads, head_dim=size, rules=rules)

    return tuple(map(make, windows))
