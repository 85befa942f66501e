"""Finds the family that builds the model of a config.json."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.architectures import SUPPORTED
from blockyard.shared.errors import ConfigError

Build = Callable[[dict[str, Any], WeightTable], Model]  # of a config.json


def find_family(config: dict[str, Any]) -> Build:
    """By config.json's first known architecture. Raises ConfigError with the list of what is supported."""
    for name in config["architectures"]:
        if name in SUPPORTED:
            # by name: the table is shared with the launcher, which may not import the families
            build: Build = resolve_name(f"{__package__}.{SUPPORTED[name]}:build")
            return build
    named = ", ".join(config["architectures"])
    raise ConfigError(f"architecture {named} is not supported; supported are {', '.join(sorted(SUPPORTED))}")
