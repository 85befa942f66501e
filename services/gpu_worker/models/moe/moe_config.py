"""Reads what configs of mixtures of experts have in common."""

from typing import Any

from blockyard.kernels.moe.routing import Routing
from blockyard.shared.errors import ConfigError


def make_routing(
    field: str, num_experts: int | None, top_k: int, top_k_field: str = "num_experts_per_tok", **options: Any
) -> Routing:
    """The routing of a config whose `field` has the number of experts. Raises ConfigError that names what is wrong."""
    if num_experts is None:
        raise ConfigError(f"config.json: {field} is missing")
    if top_k > num_experts:
        raise ConfigError(f"config.json: {top_k_field} {top_k} is more than {field} {num_experts}")
    try:
        return Routing(num_experts=num_experts, top_k=top_k, **options)
    except ValueError as e:
        raise ConfigError(f"config.json: {field} {num_experts}: {e}") from e
