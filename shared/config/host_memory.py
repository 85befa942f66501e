"""The host memory for KV blocks, by --swap-space and --preemption-mode."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from blockyard.shared.config import kv_transfer
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

USUAL_GIB = 4.0
GIB = 1 << 30


def swap_space(values: Values) -> float:
    """Returns GiB per worker. Raises ConfigError.

    --preemption-mode swap needs some, recompute none; without a given mode --swap-space decides.
    """
    asked, offloaded = values.maybe("swap-space", float), values.maybe("kv-offloading-size", float)
    if asked is not None and offloaded is not None and asked != offloaded:
        raise ConfigError(f"{values.where('kv-offloading-size')} {offloaded:g} and --swap-space {asked:g} disagree")
    asked = offloaded if asked is None else asked
    if asked is None and kv_transfer.offloads(values):
        asked = USUAL_GIB
    if values.get("preemption-mode", str) == "swap":
        size = USUAL_GIB if asked is None else asked
        if not size:
            raise ConfigError(
                f"{values.where('swap-space')} 0: --preemption-mode swap needs some; give it, or use recompute"
            )
        return size
    return 0.0 if values.is_given("preemption-mode") else asked or 0.0


def check(workers: Iterable[tuple[Values, int]], there_is: int | None = None) -> None:
    """Raises ConfigError if this machine has less memory than its workers take, each rank as much.

    workers: the flags of each kind of worker, and how many there are of it. there_is: bytes, by default this machine's.
    """
    there_is = total_memory() if there_is is None else there_is
    sizes = "tensor-parallel-size", "pipeline-parallel-size"
    ranks = [
        (values, number * math.prod(values.get(size, int) for size in sizes) // values.get("nnodes", int))
        for values, number in workers
    ]
    taken = [(swap_space(values) * number, number, values) for values, number in ranks]
    if sum(size for size, _, _ in taken) * GIB <= there_is:
        return
    _, number, values = max(taken, key=lambda one: one[0])
    others = " and those of other roles" if len(taken) > 1 else ""
    each = f" for each of {number} workers{others}" if number > 1 or others else ""
    raise ConfigError(
        f"{values.where('swap-space')} {swap_space(values):g}{each}: there are {there_is / GIB:.1f} GiB of memory on "
        "this machine"
    )


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
