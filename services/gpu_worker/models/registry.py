"""Maps the architecture in config.json to the `build` function of a model family."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.architectures import SUPPORTED
from blockyard.shared.errors import ConfigError

Build = Callable[[dict[str, Any], WeightTable], Model]  # arguments: config.json, weight table


def find_family(config: dict[str, Any]) -> Build:
    """Returns `build` for the first supported architecture in config.json. Raises ConfigError if there is none."""
    for name in config["architectures"]:
        if name in SUPPORTED:
            # the table holds names, because the launcher reads it too and must not import torch
            build: Build = resolve_name(f"{__package__}.{SUPPORTED[name]}:build")
            return build
    named = ", ".join(config["architectures"])
    raise ConfigError(f"architecture {named} is not supported; supported are {', '.join(sorted(SUPPORTED))}")
