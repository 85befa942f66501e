"""Reads what configs of mixtures of experts have in common."""

from typing import Annotated, Any

import msgspec

from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0, le=64)]


class DraftLayers(msgspec.Struct, frozen=True):
    """Layers for speculation, which checkpoints have behind the others."""

    num_nextn_predict_layers: Count | None = None  # DeepSeek's and GLM's name of it
    num_mtp_modules: Count | None = None  # MiniMax's


def leave_out_draft_layers(config: dict[str, Any], table: WeightTable, num_layers: int) -> None:
    """Names the draft layers of a checkpoint as parts that are not used."""
    own = parse(config, DraftLayers)
    count = (own.num_nextn_predict_layers or 0) + (own.num_mtp_modules or 0)
    table.leave_out(*(f"model.layers.{layer}." for layer in range(num_layers, num_layers + count)))


def make_routing(
    field: str, num_experts: int | None, top_k: int, top_k_field: str = "num_experts_per_tok", **options: Any
) -> Routing:
    """The routing of a config whose `field` has the number of experts. Raises ConfigError with the wrong field."""
    if num_experts is None:
        raise ConfigError(f"config.json: {field} is missing")
    if top_k > num_experts:
        raise ConfigError(f"config.json: {top_k_field} {top_k} is more than {field} {num_experts}")
    _check_groups(field, num_experts, top_k, top_k_field, options.get("groups", 1), options.get("top_groups", 1))
    try:
        return Routing(num_experts=num_experts, top_k=top_k, **options)
    except ValueError as e:
        raise ConfigError(f"config.json: {field} {num_experts}: {e}") from e


def _check_groups(field: str, num_experts: int, top_k: int, top_k_field: str, groups: int, top_groups: int) -> None:
    """Raises ConfigError for groups of experts (DeepSeek, GLM) that do not fit."""
    if num_experts % groups:
        raise ConfigError(f"config.json: n_group {groups} does not divide {field} {num_experts}")
    if top_groups > groups:
        raise ConfigError(f"config.json: topk_group {top_groups} is more than n_group {groups}")
    if top_k > top_groups * (num_experts // groups):
        raise ConfigError(
            f"config.json: topk_group {top_groups} leaves {top_groups * (num_experts // groups)} experts, fewer than "
            f"{top_k_field} {top_k}"
        )


def check_silu(activation: str) -> None:
    """Raises ConfigError for another activation of experts. activation: `hidden_act`."""
    if read_activation("hidden_act", activation) != "silu":
        raise ConfigError(f"config.json: hidden_act {activation!r} of experts is not supported, only silu is")
