"""OPT: learned positions, LayerNorm with biases, ReLU, and no gate in the MLP."""

from typing import Any

import msgspec
from torch import Tensor

from blockyard.services.gpu_worker.layers.attention import Attention, AttentionOptions, AttentionShape, SeparateQKV
from blockyard.services.gpu_worker.layers.embedding import LearnedPositions, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.norm import LayerNorm
from blockyard.services.gpu_worker.layers.rotary import NO_ROTATION
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.step import Step
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


def build(config: dict[str, Any], table: WeightTable) -> "OPT":
    fields = parse(config, OPTConfig)
    if fields.activation_function != "relu":
        raise ConfigError(f"config.json: activation_function {fields.activation_function!r} is not supported")
    heads, hidden = fields.num_attention_heads, fields.hidden_size
    if hidden % heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} does not divide hidden_size {hidden}")
    return OPT(fields, LinearLayers(table, config))


class OPTLayer:
    def __init__(self, config: OPTConfig, layers: LinearLayers, layer: int, shape: AttentionShape) -> None:
        prefix, hidden, bias = f"model.decoder.layers.{layer}", config.hidden_size, config.enable_bias
        table, affine = layers.table, config.layer_norm_elementwise_affine
        self._norm_first = config.do_layer_norm_before
        self._norm1 = LayerNorm(table, f"{prefix}.self_attn_layer_norm", hidden, affine)
        self._attention = Attention(
            layers,
            f"{prefix}.self_attn",
            layer,
            hidden,
            shape,
            AttentionOptions(qkv=SeparateQKV(bias=bias), out_bias=bias, out_name="out_proj", halves_dim=0),
        )
        self._norm2 = LayerNorm(table, f"{prefix}.final_layer_norm", hidden, affine)
        self._mlp = MLP(
            layers.make({f"{prefix}.fc1": config.ffn_dim}, hidden, bias=bias),
            layers.make({f"{prefix}.fc2": hidden}, config.ffn_dim, bias=bias),
            config.activation_function,
        )

    def linears(self) -> list[Linear]:
        return [*self._attention.linears(), *self._mlp.linears()]

    def forward(self, x: Tensor, step: Step, rows: Tensor | None) -> Tensor:
        """Computes the layer: x [tokens, hidden] -> the rows in `rows`, or all rows if None. May write to x."""
        qkv = self._attention.qkv(self._norm1(x) if self._norm_first else x)
        attended = self._attention.attend(qkv, NO_ROTATION, step)
        x = self._attention.out.add_to(x if rows is None else x.index_select(0, rows), attended)
        if not self._norm_first:
            x = self._norm1(x)
        x = x.add_(self._mlp(self._norm2(x) if self._norm_first else x))
        return x if self._norm_first else self._norm2(x)


class OPT:
    """The OPT decoder. Implements `Model`."""

    def __init__(self, config: OPTConfig, layers: LinearLayers) -> None:
        hidden, heads = config.hidden_size, config.num_attention_heads
        width = config.word_embed_proj_dim or hidden
        head_dim = hidden // heads
        shape = AttentionShape(num_heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5)
        self.shape = ModelShape(
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            attention=(shape,) * config.num_hidden_layers,
        )
        self.table = table = layers.table
        self._embedding = TokenEmbedding(layers, "model.decoder.embed_tokens", config.vocab_size, width)
        longest, name = config.max_position_embeddings, "model.decoder.embed_positions"
        self._positions = LearnedPositions(table, name, longest, hidden, POSITION_OFFSET)
        self._project_in = self._project_out = None
        if width != hidden:
            self._project_in = layers.make({"model.decoder.project_in": hidden}, width)
            self._project_out = layers.make({"model.decoder.project_out": width}, hidden)
        self._layers = [OPTLayer(config, layers, layer, shape) for layer in range(config.num_hidden_layers)]
        has_norm = config.do_layer_norm_before and not config.remove_final_layer_norm
        affine = config.layer_norm_elementwise_affine
        self._norm = LayerNorm(table, "model.decoder.final_layer_norm", hidden, affine) if has_norm else None
        self._head = self._embedding.make_head(layers, config.tie_word_embeddings)
        for linear in self.linears():
            linear.disable_fusion()  # fused kernels support only RMSNorm, not LayerNorm

    def prepare(self, max_model_len: int) -> list[str]:
        for linear in self.linears():
            linear.prepare()
        self._positions.prepare(max_model_len)
        return []

    def linears(self) -> list[Linear]:
        projections = [linear for linear in (self._project_in, self._project_out) if linear is not None]
        return [*(linear for layer in self._layers for linear in layer.linears()), *projections, self._head]

    def experts(self) -> list[ExpertProducts]:
        return []

    def embeddings(self) -> list[Tensor]:
        return [self._embedding.weight, self._positions.weight]

    def computed(self) -> list[Tensor]:
        return []

    def forward(self, step: Step) -> Tensor:
        x = self._embedding(step.token_ids)
        if self._project_in is not None:
            x = self._project_in(x)
        x = x + self._positions(step.positions)
        last = self._layers[-1]
        for layer in self._layers:
            x = layer.forward(x, step, step.logits_indices if layer is last else None)
        return self._norm(x) if self._norm is not None else x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._project_out(hidden) if self._project_out is not None else hidden)
