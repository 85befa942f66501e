"""Gemma 4, text (31B, 26B-A4B): layers with and without a window have other heads; experts are beside the MLP.

Layers with full attention have larger and fewer K/V heads, use the matrix of keys for values too, and rotate a part of
each head. Values have a norm. Of the models that also see and hear, this is the text part, without pictures and sounds.
E2B and E4B, whose layers have inputs of their own, are refused.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.attention import (
    Attention,
    AttentionOptions,
    AttentionShape,
    KeysAsValues,
    QKVProjection,
    SeparateQKV,
)
from blockyard.services.gpu_worker.layers.decoder_layers import Attended
from blockyard.services.gpu_worker.layers.embedding import Head, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts, stacked_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.layers.norm import head_rms_norm, make_rms_norm
from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING, read_rope
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, RotaryEmbedding, Rotation
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.gemma.gemma import read_gemma
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.models.layer_types import every, read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, check_shared_heads, llama_mlp
from blockyard.services.gpu_worker.models.moe.moe_config import make_routing
from blockyard.services.gpu_worker.step import Attend
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS
from blockyard.shared.errors import ConfigError

PERIOD = 6  # every so many layers have no window, and the last one
GATES = {"silu": Gate.SILU, "gelu_tanh": Gate.GELU_TANH}  # activations of experts
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
DEFAULTS = {  # of fields that config.json may omit
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "rope_parameters": ROPE,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
}


class LayerSizes(msgspec.Struct, frozen=True):
    """Sizes of one layer in config.json."""

    head_dim: bounds.HeadSize | None = None
    num_key_value_heads: bounds.Heads | None = None


class Gemma4Config(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = UNSAID_WINDOWS["Gemma4ForCausalLM"]  # 0 or null: no window
    head_dim: bounds.HeadSize = 256
    num_key_value_heads: bounds.Heads = 4
    global_head_dim: bounds.HeadSize = 512  # of layers with full attention
    num_global_key_value_heads: bounds.Heads | None = None  # of these layers, if keys are values
    attention_k_eq_v: bool = False  # in these layers
    per_layer_config: dict[str, LayerSizes] | None = None  # by number of the layer, in the place of the three above
    final_logit_softcapping: bounds.Scale | None = None
    hidden_size_per_layer_input: int = 256
    num_kv_shared_layers: int = 0
    use_bidirectional_attention: str | None = None
    enable_moe_block: bool = False

    def sizes(self, layer: int, kind: str) -> LayerSizes:
        """The sizes of a layer, both known."""
        size, kv_heads = self.head_dim, self.num_key_value_heads
        if kind == FULL and self.per_layer_config is None:
            size = self.global_head_dim
            kv_heads = (self.num_global_key_value_heads if self.attention_k_eq_v else None) or kv_heads
        own = (self.per_layer_config or {}).get(str(layer), LayerSizes())
        return LayerSizes(own.head_dim or size, own.num_key_value_heads or kv_heads)


class ExpertsConfig(msgspec.Struct, frozen=True):
    num_experts: bounds.Experts
    top_k_experts: bounds.Experts
    moe_intermediate_size: bounds.Width


class LayerNorms(NamedTuple):
    """The norms of a layer's sublayers."""

    before_attention: RMSNorm
    after_attention: RMSNorm
    before_mlp: RMSNorm
    after_mlp: RMSNorm


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Experts beside the dense MLP. They and their router read the residual, each through a norm of its own."""

    experts: RoutedExperts
    router_norm: RMSNorm
    before: RMSNorm
    after: RMSNorm
    after_dense: RMSNorm  # of the output of the dense MLP, before both are added

    def prepare(self) -> None:
        for norm in (self.router_norm, self.before, self.after, self.after_dense):
            norm.prepare()


class Gemma4Layer:
    """Norms before and after each sublayer, and a factor of the residual behind them. Implements `DecoderLayer`."""

    def __init__(
        self, attention: Attention, mlp: GatedMLP, norms: LayerNorms, factor: Tensor, beside: ExpertsBeside | None
    ) -> None:
        """factor: [1]."""
        self._attention, self._mlp, self._norms, self._factor, self._beside = attention, mlp, norms, factor, beside
        for linear in self.linears()[1:]:  # no fused kernel computes a norm of the output
            linear.disable_fusion()

    def prepare(self) -> None:
        self._attention.prepare()
        for norm in self._norms:
            norm.prepare()
        if self._beside is not None:
            self._beside.prepare()

    def linears(self) -> list[Linear]:
        beside = self._beside.experts.linears() if self._beside is not None else []
        return [*self._attention.linears(), *self._mlp.linears(), *beside]

    def experts(self) -> list[ExpertProducts]:
        return self._beside.experts.experts() if self._beside is not None else []

    def attend(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, backend: Attend) -> Attended:
        return self._attention.attend(residual, delta, self._norms.before_attention, rotation, backend), None

    def finish(self, residual: Tensor, attended: Attended) -> tuple[Tensor, Tensor | None]:
        norms, beside, ops = self._norms, self._beside, self._attention.ops
        out = self._attention.out(attended[0])
        del attended
        if beside is None:
            [x] = ops.add_normed(residual, out, norms.after_attention, [norms.before_mlp])
            ops.add_normed(residual, self._mlp.apply(x), norms.after_mlp, factor=self._factor)
            return residual, None
        then = (norms.before_mlp, beside.before, beside.router_norm)
        x, experts_input, router_input = ops.add_normed(residual, out, norms.after_attention, then)
        dense = self._mlp.apply(x)
        routed = beside.experts.apply_routed(experts_input, router_input)
        both = (beside.after_dense, routed, beside.after)
        ops.add_normed(residual, dense, norms.after_mlp, beside=both, factor=self._factor)
        return residual, None


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, own = read_gemma(config), parse(config, Gemma4Config)
    _refuse(own)
    table.leave_out("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
    hidden, longest, num_layers = fields.hidden_size, fields.max_position_embeddings, fields.num_hidden_layers
    kinds = [*read_layer_types(config, num_layers, every(PERIOD))[:-1], FULL]
    shapes = tuple(_shape(layer, kind, fields, own) for layer, kind in enumerate(kinds))
    rotations = _rotations(config, kinds, shapes, longest)
    layers = LinearLayers(table, config)
    factor = float(torch.tensor(hidden**0.5, dtype=table.dtype))  # rounded as the model was trained
    embedding = TokenEmbedding(layers, "model.embed_tokens", fields.vocab_size, hidden, factor=factor)
    experts = parse(config, ExpertsConfig) if own.enable_moe_block else None

    def make_layer(layer: int) -> Gemma4Layer:
        prefix, rotary = f"model.layers.{layer}", rotations[layer]
        bias, halves = fields.attention_bias, rotary.rotary_dim
        qkv: QKVProjection = SeparateQKV(bias=bias)
        if own.attention_k_eq_v and kinds[layer] == FULL:
            qkv = KeysAsValues(bias=bias)
        norm = head_rms_norm(fields.rms_norm_eps, with_values=True)
        options = AttentionOptions(qkv=qkv, out_bias=bias, qk_norm=norm, halves_dim=halves)
        return Gemma4Layer(
            Attention(layers, f"{prefix}.self_attn", layer, hidden, shapes[layer], options),
            llama_mlp(layers, fields, prefix),
            LayerNorms(
                *(
                    make_rms_norm(table, f"{prefix}.{name}layernorm", hidden, fields.rms_norm_eps)
                    for name in ("input_", "post_attention_", "pre_feedforward_", "post_feedforward_")
                )
            ),
            table.vector(f"{prefix}.layer_scalar", 1),
            None if experts is None else _make_experts(layers, fields, experts, prefix),
        )

    return Decoder(
        table,
        ModelShape(vocab_size=fields.vocab_size, max_positions=longest, attention=shapes),
        embedding=embedding,
        make_layer=make_layer,
        norm=make_rms_norm(table, "model.norm", hidden, fields.rms_norm_eps),
        head=Head(embedding.make_head(layers, fields.tie_word_embeddings), soft_cap=own.final_logit_softcapping),
        rotations=LayerRotations(rotations),
    )


def _refuse(own: Gemma4Config) -> None:
    """Raises ConfigError for the inputs of each layer and the shared keys and values of E2B and E4B."""
    if own.hidden_size_per_layer_input:
        raise ConfigError(
            f"config.json: hidden_size_per_layer_input {own.hidden_size_per_layer_input} is not supported: each layer "
            "of Gemma 4 E2B and E4B has inputs of its own beside the hidden state"
        )
    if own.num_kv_shared_layers:
        raise ConfigError(
            f"config.json: num_kv_shared_layers {own.num_kv_shared_layers} is not supported: each layer has its own "
            "keys and values"
        )
    if own.use_bidirectional_attention == "all":
        raise ConfigError("config.json: use_bidirectional_attention is not supported: tokens attend to earlier ones")


def _shape(layer: int, kind: str, fields: LlamaConfig, own: Gemma4Config) -> AttentionShape:
    heads, sizes = fields.num_attention_heads, own.sizes(layer, kind)
    assert sizes.head_dim is not None  # both have defaults
    assert sizes.num_key_value_heads is not None
    is_global = kind == FULL and own.attention_k_eq_v and own.num_global_key_value_heads is not None
    kv_field = "num_global_key_value_heads" if is_global else "num_key_value_heads"
    check_shared_heads(heads, sizes.num_key_value_heads, kv_field, f" in layer {layer}")
    return AttentionShape(
        num_heads=heads,
        kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        rules=ScoreRules(scale=1.0, window=own.sliding_window or None if kind == SLIDING else None),
    )


def _rotations(
    config: dict[str, Any], kinds: list[str], shapes: tuple[AttentionShape, ...], longest: int
) -> list[RotaryEmbedding]:
    """The rotation of each layer: one of a kind and head size."""
    found: dict[tuple[str, int], RotaryEmbedding] = {}
    for kind, shape in zip(kinds, shapes, strict=True):
        if (kind, shape.head_dim) not in found:
            rope = read_rope(config, longest, layer_type=kind)
            found[kind, shape.head_dim] = RotaryEmbedding(rope, shape.head_dim, longest)
    return [found[kind, shape.head_dim] for kind, shape in zip(kinds, shapes, strict=True)]


def _make_experts(layers: LinearLayers, fields: LlamaConfig, own: ExpertsConfig, prefix: str) -> ExpertsBeside:
    table, hidden, eps = layers.table, fields.hidden_size, fields.rms_norm_eps
    activation = read_activation("hidden_activation", fields.hidden_act)
    if activation not in GATES:
        raise ConfigError(f"config.json: hidden_activation {fields.hidden_act!r} of experts is not supported")
    routing: Routing = make_routing("num_experts", own.num_experts, own.top_k_experts, "top_k_experts")
    router_weight = table.empty(hidden, dtype=torch.float32)
    table.place(f"{prefix}.router.scale", router_weight, (hidden,), lambda scale: scale.float() * hidden**-0.5)
    names = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"

    def make_norm(name: str) -> RMSNorm:
        return make_rms_norm(table, f"{prefix}.{name}", hidden, eps)

    return ExpertsBeside(
        RoutedExperts(
            layers.make([part(f"{prefix}.router.proj", own.num_experts)], hidden),
            stacked_experts(layers, *names, own.num_experts, hidden, own.moe_intermediate_size),
            routing,
            expert_factors=table.vector(f"{prefix}.router.per_expert_scale", own.num_experts),
            gate=GATES[activation],
        ),
        router_norm=RMSNorm(router_weight, eps),
        before=make_norm("pre_feedforward_layernorm_2"),
        after=make_norm("post_feedforward_layernorm_2"),
        after_dense=make_norm("post_feedforward_layernorm_1"),
    )
