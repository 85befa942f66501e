"""StarCoder 2: Llama with LayerNorm, biases everywhere, and an MLP without a gate."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.layers.norm import LayerNorm, Norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, biased, build_llama
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


class Starcoder2Config(msgspec.Struct, frozen=True):
    norm_epsilon: bounds.Epsilon = 1e-5
    use_bias: bool = True
    sliding_window: bounds.Window | None = None  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, own = parse(config, LlamaConfig), parse(config, Starcoder2Config)
    hidden, inner, bias = fields.hidden_size, fields.intermediate_size, own.use_bias
    activation = read_activation("hidden_act", fields.hidden_act)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> MLP:
        up, down = f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj"
        return MLP(layers, up, down, hidden, inner, activation, bias=bias)

    def make_norm(weights: WeightTable, name: str) -> Norm:
        return LayerNorm(weights, name, hidden, eps=own.norm_epsilon)

    variant = LlamaVariant(
        attention=biased(bias),
        windows=(own.sliding_window or None,) * fields.num_hidden_layers,
        make_norm=make_norm,
        make_mlp=make_mlp,
    )
    return build_llama(config, fields, table, variant)
