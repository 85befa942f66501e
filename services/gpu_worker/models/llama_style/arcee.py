"""Arcee AFM: Llama with an MLP without a gate, and the square of ReLU."""

from typing import Any

from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, biased, build_llama

DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}  # that config.json may omit


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = parse(config, LlamaConfig)
    hidden, inner, bias = fields.hidden_size, fields.intermediate_size, fields.mlp_bias
    activation = read_activation("hidden_act", fields.hidden_act)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> MLP:
        up, down = f"{prefix}.mlp.up_proj", f"{prefix}.mlp.down_proj"
        return MLP(layers, up, down, hidden, inner, activation, bias=bias)

    attention = biased(fields.attention_bias)
    return build_llama(config, fields, table, LlamaVariant(attention=attention, make_mlp=make_mlp))
