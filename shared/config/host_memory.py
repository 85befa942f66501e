"""The host memory for KV blocks, by --swap-space and --preemption-mode."""

import os
from pathlib import Path

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

USUAL_GIB = 4.0
GIB = 1 << 30


def swap_space(values: Values, there_is: int | None = None) -> float:
    """Returns GiB per worker. `there_is`: bytes of memory, by default this machine's. Raises ConfigError.

    --preemption-mode swap needs some, recompute none; without a given mode --swap-space decides.
    """
    asked = values.maybe("swap-space", float)
    if values.get("preemption-mode", str) == "swap":
        size = USUAL_GIB if asked is None else asked
        if not size:
            raise ConfigError(
                f"{values.where('swap-space')} 0: --preemption-mode swap needs some; give it, or use recompute"
            )
    elif values.is_given("preemption-mode"):
        return 0.0
    else:
        size = asked or 0.0
    there_is = total_memory() if there_is is None else there_is
    replicas = values.get("data-parallel-size", int)
    if size * GIB * replicas > there_is:
        each = f" for each of {replicas} replicas" if replicas > 1 else ""
        raise ConfigError(
            f"{values.where('swap-space')} {size:g}{each}: there are {there_is / GIB:.1f} GiB of memory on this machine"
        )
    return size


def notes(values: Values) -> list[str]:
    """Returns a line if --swap-space has no effect."""
    if values.maybe("swap-space", float) and values.is_given("preemption-mode") and not swap_space(values):
        return [f"{values.where('swap-space')}: no host memory is taken, --preemption-mode is recompute"]
    return []


def total_memory(limit_file: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the bytes of memory of this machine, or of its container if smaller."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(limit_file.read_text("ascii")))
    except (OSError, ValueError):  # no such file, or "max"
        return total
