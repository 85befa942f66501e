"""BERT: learned positions, token types of pairs, LayerNorm behind each sublayer. `build_bert` also builds RoBERTa."""

from collections.abc import Callable
from typing import Any

import msgspec

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionOptions, AttentionShape, SeparateQKV
from blockyard.services.gpu_worker.layers.embedding import LearnedPositions, OutputLayer, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.layers.norm import LayerNorm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.encoders.encoder import Encoder, EncoderEmbedding, EncoderLayer
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.models.output_layers import NoOutput, Stack, make_linear
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.pooling.activations import num_labels
from blockyard.shared.config.pooling.output_kinds import OutputKind, first_kind
from blockyard.shared.errors import ConfigError

DEFAULTS = {  # of fields that config.json may omit
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
QKV = AttentionOptions(
    qkv=SeparateQKV(names=("self.query", "self.key", "self.value"), bias=True),
    out_name="output.dense",
    out_bias=True,
    halves_dim=0,
)
MakeOutput = Callable[[OutputKind, LinearLayers, int, int], OutputLayer]  # given kind, layers, hidden and labels


class BertConfig(msgspec.Struct, frozen=True):
    """The fields of config.json that BERT and RoBERTa use."""

    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    intermediate_size: bounds.Width
    max_position_embeddings: bounds.Positions
    layer_norm_eps: bounds.Epsilon
    hidden_act: str
    type_vocab_size: int
    pad_token_id: int | None = None
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False


def build(config: dict[str, Any], table: WeightTable) -> Encoder:
    config = with_defaults(config, DEFAULTS)
    return build_bert(config, parse(config, BertConfig), table, "bert", 0, _make_output)


def _make_output(kind: OutputKind, layers: LinearLayers, hidden: int, labels: int) -> OutputLayer:
    """A classifier of sequences reads the pooler of the first token, one of tokens the hidden states."""
    classifier = make_linear(layers, "classifier", labels, hidden, bias=True)
    if kind is OutputKind.TOKEN_CLASSES:
        return Stack([classifier], "tanh")
    return Stack([make_linear(layers, "bert.pooler.dense", hidden, hidden, bias=True), classifier], "tanh")


def build_bert(
    config: dict[str, Any],
    fields: BertConfig,
    table: WeightTable,
    prefix: str,
    first_position: int,
    make_output: MakeOutput,
) -> Encoder:
    """Builds an encoder with BERT's layers.

    prefix: of names in checkpoints of classifiers; those of a bare encoder lack it. first_position: the row of the
    first token's position in the table of positions. Raises ConfigError.
    """
    _check(fields, first_position)
    layers, hidden, kind = LinearLayers(table, config), fields.hidden_size, first_kind(config)
    table.leave_out("pooler.", f"{prefix}.pooler.", "cls.", "lm_head.")
    shape, labels = _shape(fields), num_labels(config)
    has_output = kind in (OutputKind.CLASSES, OutputKind.TOKEN_CLASSES)
    return Encoder(
        table,
        _model_shape(fields, shape, first_position, labels if has_output else hidden),
        embedding=_embedding(fields, layers, prefix, first_position),
        layers=[
            _layer(fields, layers, f"{prefix}.encoder.layer.{i}", i, shape) for i in range(fields.num_hidden_layers)
        ],
        output=make_output(kind, layers, hidden, labels) if has_output else NoOutput(),
    )


def _model_shape(fields: BertConfig, shape: AttentionShape, first_position: int, num_outputs: int) -> ModelShape:
    return ModelShape(
        vocab_size=fields.vocab_size,
        max_positions=fields.max_position_embeddings - first_position,
        attention=(shape,) * fields.num_hidden_layers,
        has_kv=False,
        num_outputs=num_outputs,
    )


def _check(fields: BertConfig, first_position: int) -> None:
    if fields.position_embedding_type != "absolute":
        raise ConfigError(
            f"config.json: position_embedding_type {fields.position_embedding_type!r} is not supported; 'absolute' is"
        )
    if fields.is_decoder or fields.add_cross_attention:
        raise ConfigError("config.json: is_decoder and add_cross_attention are not supported: the model is an encoder")
    if fields.hidden_size % fields.num_attention_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {fields.num_attention_heads} does not divide hidden_size "
            f"{fields.hidden_size}"
        )
    if fields.max_position_embeddings <= first_position:
        raise ConfigError(
            f"config.json: max_position_embeddings {fields.max_position_embeddings} has no position behind pad_token_id"
        )


def _shape(fields: BertConfig) -> AttentionShape:
    heads, size = fields.num_attention_heads, fields.hidden_size // fields.num_attention_heads
    rules = ScoreRules(scale=size**-0.5, both_sides=True)
    return AttentionShape(num_heads=heads, kv_heads=heads, head_dim=size, rules=rules)


def layer_norm(table: WeightTable, name: str, fields: BertConfig) -> LayerNorm:
    """Makes a LayerNorm; early checkpoints call its weight gamma and its bias beta."""
    norm = LayerNorm(table, name, fields.hidden_size, eps=fields.layer_norm_eps)
    table.alias(f"{name}.gamma", f"{name}.weight")
    table.alias(f"{name}.beta", f"{name}.bias")
    return norm


def _embedding(fields: BertConfig, layers: LinearLayers, prefix: str, first_position: int) -> EncoderEmbedding:
    name, hidden, table = f"{prefix}.embeddings", fields.hidden_size, layers.table
    table.ignore_suffix(".token_type_ids")
    types = fields.type_vocab_size
    return EncoderEmbedding(
        TokenEmbedding(layers, f"{name}.word_embeddings", fields.vocab_size, hidden),
        LearnedPositions(
            table,
            f"{name}.position_embeddings",
            fields.max_position_embeddings - first_position,
            hidden,
            first_position,
        ),
        table.matrix(f"{name}.token_type_embeddings.weight", types, hidden) if types else None,
        layer_norm(table, f"{name}.LayerNorm", fields),
    )


def _layer(fields: BertConfig, layers: LinearLayers, prefix: str, number: int, shape: AttentionShape) -> EncoderLayer:
    hidden, table = fields.hidden_size, layers.table
    up, down = f"{prefix}.intermediate.dense", f"{prefix}.output.dense"
    activation = read_activation("hidden_act", fields.hidden_act)
    return EncoderLayer(
        Attention(layers, f"{prefix}.attention", number, hidden, shape, QKV),
        layer_norm(table, f"{prefix}.attention.output.LayerNorm", fields),
        MLP(layers, up, down, hidden, fields.intermediate_size, activation, bias=True),
        layer_norm(table, f"{prefix}.output.LayerNorm", fields),
    )
