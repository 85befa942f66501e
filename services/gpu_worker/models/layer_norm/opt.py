"""OPT: learned positions, LayerNorm with biases, ReLU, and no gate in the MLP."""

from typing import Any

import msgspec
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionOptions, AttentionShape, SeparateQKV
from blockyard.services.gpu_worker.layers.decoder_layers import Attended, DecoderLayer, PreNormLayer, Sublayers
from blockyard.services.gpu_worker.layers.embedding import Head, LearnedPositions, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.layers.norm import LayerNorm, NoNorm, Norm
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, Rotation
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.step import Attend
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

POSITION_OFFSET = 2  # the first two rows of the position table are padding


class OPTConfig(msgspec.Struct, frozen=True, rename={"remove_final_layer_norm": "_remove_final_layer_norm"}):
    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    ffn_dim: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    max_position_embeddings: bounds.Positions = 2048
    word_embed_proj_dim: bounds.Width | None = None  # None: hidden_size
    do_layer_norm_before: bool = True  # False in opt-350m: LayerNorm after each sublayer
    remove_final_layer_norm: bool = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    activation_function: str = "relu"
    tie_word_embeddings: bool = True


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config, OPTConfig)
    if fields.activation_function != "relu":
        raise ConfigError(f"config.json: activation_function {fields.activation_function!r} is not supported")
    heads, hidden = fields.num_attention_heads, fields.hidden_size
    if hidden % heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} does not divide hidden_size {hidden}")
    head_dim, width, longest = hidden // heads, fields.word_embed_proj_dim or hidden, fields.max_position_embeddings
    layers, affine = LinearLayers(table, config), fields.layer_norm_elementwise_affine
    project_in = project_out = None
    if width != hidden:
        project_in = layers.make([part("model.decoder.project_in", hidden)], width)
        project_out = layers.make([part("model.decoder.project_out", width)], hidden)
    embedding = TokenEmbedding(layers, "model.decoder.embed_tokens", fields.vocab_size, width, project=project_in)
    shape = AttentionShape(num_heads=heads, kv_heads=heads, head_dim=head_dim, rules=ScoreRules(scale=head_dim**-0.5))
    norm: Norm = NoNorm()
    if fields.do_layer_norm_before and not fields.remove_final_layer_norm:
        norm = LayerNorm(table, "model.decoder.final_layer_norm", hidden, affine)
    return Decoder(
        table,
        ModelShape(vocab_size=fields.vocab_size, max_positions=longest, attention=(shape,) * fields.num_hidden_layers),
        embedding=embedding,
        positions=LearnedPositions(table, "model.decoder.embed_positions", longest, hidden, POSITION_OFFSET),
        make_layer=lambda layer: _layer(fields, layers, layer, shape),
        norm=norm,
        head=Head(embedding.make_head(layers, fields.tie_word_embeddings), project=project_out),
        rotations=LayerRotations((None,) * fields.num_hidden_layers),
    )


def _layer(fields: OPTConfig, layers: LinearLayers, layer: int, shape: AttentionShape) -> DecoderLayer:
    prefix, hidden, bias = f"model.decoder.layers.{layer}", fields.hidden_size, fields.enable_bias
    options = AttentionOptions(qkv=SeparateQKV(bias=bias), out_bias=bias, out_name="out_proj", halves_dim=0)
    attention = Attention(layers, f"{prefix}.self_attn", layer, hidden, shape, options)
    up, down = f"{prefix}.fc1", f"{prefix}.fc2"
    mlp = MLP(layers, up, down, hidden, fields.ffn_dim, fields.activation_function, bias=bias)
    norm1, norm2 = (
        LayerNorm(layers.table, f"{prefix}.{name}", hidden, fields.layer_norm_elementwise_affine)
        for name in ("self_attn_layer_norm", "final_layer_norm")
    )
    if fields.do_layer_norm_before:
        return PreNormLayer(norm1, attention, norm2, mlp)
    return SumNormLayer(attention, norm1, mlp, norm2)


class SumNormLayer(Sublayers):
    """The residual itself is normalised after each sublayer, as in opt-350m. Implements `DecoderLayer`."""

    def __init__(self, attention: Attention, norm1: Norm, mlp: MLP, norm2: Norm) -> None:
        super().__init__(attention, mlp, norm1, norm2)
        self._attention, self._norm1, self._mlp, self._norm2 = attention, norm1, mlp, norm2
        for linear in self.linears():
            linear.disable_fusion()

    def attend(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, backend: Attend) -> Attended:
        """Implements `DecoderLayer`. delta is None: `finish` returns none."""
        return self._attention.attend_normed(residual, rotation, backend), None

    def finish(self, residual: Tensor, attended: Attended) -> tuple[Tensor, Tensor | None]:
        ops = self._attention.ops
        x = ops.norm_of_sum(residual, self._attention.out(attended[0]), self._norm1)
        del attended
        return ops.norm_of_sum(x, self._mlp.apply(x), self._norm2), None
