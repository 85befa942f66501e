"""Maps the architecture in config.json to the `build` function of a model family."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.architectures import describe_refusal, find_architecture, may_be_in_transformers
from blockyard.shared.errors import ConfigError

TRANSFORMERS = "transformers_model"  # the module that runs classes of transformers
Build = Callable[[dict[str, Any], WeightTable], Model]  # arguments: config.json, weight table


def find_family(config: dict[str, Any], model_impl: str = "auto") -> Build:
    """Returns `build` for the first supported architecture in config.json, or that of transformers.

    model_impl: "auto" takes transformers for an architecture that the table does not know, "transformers" for all.
    Raises ConfigError if there is none.
    """
    names = config["architectures"]
    found = find_architecture(names)
    if model_impl == "transformers" or (found is None and may_be_in_transformers(config)):
        module = TRANSFORMERS
    elif found is None:
        raise ConfigError(describe_refusal(config))
    else:
        module = found.module
    # Loads this family alone: all others take 40 ms of each start, and transformers 3 s and 180 MB. The table holds
    # names, because the launcher reads it too and must not import torch.
    build: Build = resolve_name(f"{__package__}.{module}:build")
    return build


def is_of_transformers(build: Build) -> bool:
    return build.__module__ == f"{__package__}.{TRANSFORMERS}"
