"""Gemma 1: Llama with norms that store their weight minus 1, scaled embeddings and a GELU. Base of Gemma 2 and 3."""

from typing import Any

import msgspec
import torch

from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.norm import Norm, make_rms_norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, biased, build_llama

TANH = "gelu_pytorch_tanh"
DEFAULTS = {  # of fields that config.json may omit
    "head_dim": 256,
    "hidden_act": TANH,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    activation = TANH if config["hidden_act"] == "gelu" else config["hidden_act"]  # a name of early releases
    fields = read_gemma(config | {"hidden_activation": activation})
    return build_llama(config, fields, table, gemma_variant(fields, table, attention=biased(fields.attention_bias)))


def read_gemma(config: dict[str, Any]) -> LlamaConfig:
    """Reads config.json, which calls the activation `hidden_activation`."""
    activation = str(config.get("hidden_activation") or TANH)
    read_activation("hidden_activation", activation)
    fields = parse(config | {"hidden_act": activation}, LlamaConfig)
    return msgspec.structs.replace(fields, mlp_bias=False)


def gemma_variant(fields: LlamaConfig, table: WeightTable, **parts: Any) -> LlamaVariant:
    """Returns what Gemma models share, with other `parts` of the variant."""

    def make_norm(weights: WeightTable, name: str) -> Norm:
        return make_rms_norm(weights, name, fields.hidden_size, fields.rms_norm_eps, unit_offset=True)

    rounded = torch.tensor(fields.hidden_size**0.5, dtype=table.dtype)  # as the model was trained
    return LlamaVariant(embedding_factor=float(rounded), make_norm=make_norm, **parts)
