"""Which family builds which architecture. A new family is a file and a line here."""

from collections.abc import Callable
from typing import Any

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models import llama, mistral, opt, qwen2, qwen3
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.shared.errors import ConfigError

Build = Callable[[dict[str, Any], WeightTable], Model]  # of a config.json

FAMILIES: dict[str, Build] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "OPTForCausalLM": opt.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}


def find_family(config: dict[str, Any]) -> Build:
    """By config.json's first known architecture. Raises ConfigError with the list of what is supported."""
    for name in config["architectures"]:
        if name in FAMILIES:
            return FAMILIES[name]
    named = ", ".join(config["architectures"])
    raise ConfigError(f"architecture {named} is not supported; supported are {', '.join(sorted(FAMILIES))}")
