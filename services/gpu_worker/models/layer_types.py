"""Reads the kind of each layer from config.json, where layers differ in their attention."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.shared.errors import ConfigError

KINDS = (FULL, SLIDING)


class NoRopeLayers(msgspec.Struct, frozen=True):
    no_rope_layers: list[int] | None = None  # of each layer: 1 if it rotates, otherwise 0; null or empty: not said
    no_rope_layer_interval: Annotated[int, msgspec.Meta(ge=1)] = 4  # otherwise every so many layers do not


def read_rotating_layers(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Returns which layers rotate, by `no_rope_layers`. Raises ConfigError for a list of another length."""
    own = parse(config, NoRopeLayers)
    if not own.no_rope_layers:
        return [(layer + 1) % own.no_rope_layer_interval != 0 for layer in range(num_layers)]
    if len(own.no_rope_layers) != num_layers:
        raise ConfigError(f"config.json: no_rope_layers has {len(own.no_rope_layers)} entries for {num_layers} layers")
    return [bool(rotates) for rotates in own.no_rope_layers]


def read_layer_types(
    config: Mapping[str, Any], num_layers: int, default: Callable[[int], str], kinds: Sequence[str] = KINDS
) -> Sequence[str]:
    """Returns the kind of each layer, one of `kinds`, by `default` of its number if config.json has no `layer_types`.

    Raises ConfigError for another kind or a list of another length.
    """
    found = config.get("layer_types")
    if found is None:
        return [default(layer) for layer in range(num_layers)]
    if not isinstance(found, list) or len(found) != num_layers or not set(found) <= set(kinds):
        raise ConfigError(f"config.json: layer_types {found} must name {num_layers} of {', '.join(kinds)}")
    return found


def every(period: int) -> Callable[[int], str]:
    """Every so many layers attend to all tokens, the others within a window. period: at least 1."""
    return lambda layer: FULL if (layer + 1) % period == 0 else SLIDING
