"""ModernBERT: attention of both sides, in most layers within a window; rotations of two kinds; gated MLPs."""

from typing import Annotated, Any

import msgspec

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionOptions, AttentionShape, JoinedQKV
from blockyard.services.gpu_worker.layers.decoder_layers import PreNormLayer
from blockyard.services.gpu_worker.layers.embedding import OutputLayer, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.layers.norm import LayerNorm, NoNorm
from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING, read_rope
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.models.layer_types import read_layer_types
from blockyard.services.gpu_worker.models.output_layers import NoOutput, Stack, make_linear
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.pooling.activations import num_labels
from blockyard.shared.config.pooling.output_kinds import OutputKind, first_kind
from blockyard.shared.errors import ConfigError

DEFAULTS = {  # of fields that config.json may omit
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
}


class ModernBertConfig(msgspec.Struct, frozen=True):
    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    intermediate_size: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    max_position_embeddings: bounds.Positions
    norm_eps: bounds.Epsilon = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_activation: str = "gelu"
    local_attention: bounds.Window = 128  # keys of both sides together
    global_attn_every_n_layers: Annotated[int, msgspec.Meta(ge=1)] = 3
    global_rope_theta: bounds.Base = 160000.0
    local_rope_theta: bounds.Base = 10000.0
    classifier_bias: bool = False
    classifier_activation: str = "gelu"


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = parse(config, ModernBertConfig)
    hidden, heads = fields.hidden_size, fields.num_attention_heads
    if hidden % heads or hidden // heads % 2:
        raise ConfigError(f"config.json: hidden_size {hidden} makes no {heads} heads of an even size")
    period = fields.global_attn_every_n_layers
    kinds = read_layer_types(config, fields.num_hidden_layers, lambda layer: SLIDING if layer % period else FULL)
    shapes = tuple(_shape(fields, kind) for kind in kinds)
    rotations = {kind: _rotary(config, fields, kind) for kind in (FULL, SLIDING)}
    layers, output = LinearLayers(table, config), first_kind(config)
    table.leave_out("head.", "decoder.")
    embedding = TokenEmbedding(
        layers, "model.embeddings.tok_embeddings", fields.vocab_size, hidden,
        norm=_norm(fields, table, "model.embeddings.norm"),
    )  # fmt: skip
    has_output = output in (OutputKind.CLASSES, OutputKind.TOKEN_CLASSES)
    labels = num_labels(config)
    return Decoder(
        table,
        ModelShape(
            vocab_size=fields.vocab_size,
            max_positions=fields.max_position_embeddings,
            attention=shapes,
            has_kv=False,
            num_outputs=labels if has_output else hidden,
        ),
        embedding=embedding,
        make_layer=lambda number: _layer(fields, layers, number, shapes[number]),
        norm=_norm(fields, table, "model.final_norm"),
        head=_classifier(fields, layers, labels) if has_output else NoOutput(),
        rotations=LayerRotations([rotations[kind] for kind in kinds]),
    )


def _norm(fields: ModernBertConfig, table: WeightTable, name: str) -> LayerNorm:
    return LayerNorm(table, name, fields.hidden_size, eps=fields.norm_eps, bias=fields.norm_bias)


def _shape(fields: ModernBertConfig, kind: str) -> AttentionShape:
    heads, size = fields.num_attention_heads, fields.hidden_size // fields.num_attention_heads
    window = fields.local_attention // 2 + 1 if kind == SLIDING else None
    rules = ScoreRules(scale=size**-0.5, window=window, both_sides=True)
    return AttentionShape(num_heads=heads, kv_heads=heads, head_dim=size, rules=rules)


def _rotary(config: dict[str, Any], fields: ModernBertConfig, kind: str) -> RotaryEmbedding:
    theta = fields.global_rope_theta if kind == FULL else fields.local_rope_theta
    longest, size = fields.max_position_embeddings, fields.hidden_size // fields.num_attention_heads
    return RotaryEmbedding(read_rope(config | {"rope_theta": theta}, longest, layer_type=kind), size, longest)


def _layer(fields: ModernBertConfig, layers: LinearLayers, number: int, shape: AttentionShape) -> PreNormLayer:
    prefix, hidden, table = f"model.layers.{number}", fields.hidden_size, layers.table
    options = AttentionOptions(
        qkv=JoinedQKV(name="Wqkv", bias=fields.attention_bias), out_name="Wo", out_bias=fields.attention_bias
    )
    activation = read_activation("hidden_activation", fields.hidden_activation)
    return PreNormLayer(
        NoNorm() if number == 0 else _norm(fields, table, f"{prefix}.attn_norm"),  # the embeddings have one
        Attention(layers, f"{prefix}.attn", number, hidden, shape, options),
        _norm(fields, table, f"{prefix}.mlp_norm"),
        GatedMLP(
            layers,
            f"{prefix}.mlp",
            hidden,
            fields.intermediate_size,
            activation,
            fields.mlp_bias,
            joined="Wi",
            down="Wo",
        ),
    )


def _classifier(fields: ModernBertConfig, layers: LinearLayers, labels: int) -> OutputLayer:
    """Dense, activation and norm, then the labels: of a pooled sequence or of each token."""
    hidden = fields.hidden_size
    dense = make_linear(layers, "head.dense", hidden, hidden, bias=fields.classifier_bias)
    last = make_linear(layers, "classifier", labels, hidden, bias=True)
    activation = read_activation("classifier_activation", fields.classifier_activation)
    return Stack([dense, last], activation, _norm(fields, layers.table, "head.norm"))
