"""What the compilation levels of the field mean here, where kernels are written by hand."""

from typing import Any

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

FLAG = "compilation-config"
LEVELS = range(4)


class Compilation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of the field's JSON has a counterpart."""

    level: int = 2
    use_cudagraph: bool = True
    cudagraph_capture_sizes: list[int] = []


def graph_fields(values: Values) -> dict[str, Any]:
    """Of WorkerConfig: CUDA graphs, of which sizes and how many kernels. Raises ConfigError."""
    given = values.maybe(FLAG, str)
    asked = _read(values, given) if given is not None else Compilation()
    eager = values.get("enforce-eager", bool) or asked.level == 0
    return {
        "enforce_eager": eager or not asked.use_cudagraph,
        "fused_steps": asked.level >= 2,
        "graph_sizes": sorted(set(asked.cudagraph_capture_sizes)),
    }


def _read(values: Values, given: str) -> Compilation:
    text = given if given.lstrip().startswith("{") else f'{{"level": {given}}}'
    try:
        asked = msgspec.json.decode(text, type=Compilation)
    except msgspec.DecodeError as e:
        known = ", ".join(Compilation.__struct_fields__)
        raise ConfigError(
            f"{values.where(FLAG)} {given}: a level from 0 to 3, or a JSON object of {known} ({e})"
        ) from e
    if asked.level not in LEVELS:
        raise ConfigError(f"{values.where(FLAG)} {given}: levels are 0 to 3")
    if any(size < 1 for size in asked.cudagraph_capture_sizes):
        raise ConfigError(f"{values.where(FLAG)} {given}: sizes of graphs are 1 or more")
    return asked
