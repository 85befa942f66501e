"""Figures of LoRA adapters that are no item of `bench suite`: loads, many adapters, the scheduler, the CPU.

    python tests/bench/adapters/bench_adapters.py [host disk loads zipf schedule cpu ...] [--model NAME] [--limit 570]
    python tests/bench/adapters/bench_adapters.py host disk loads zipf --small    # the demo model on the CPU

NAME is one of `bench suite`'s models, with random weights, or `demo`. *host*, *disk* and *loads* share a server. A row
that fails is printed with its cause, and the others are still measured. `bench suite` has the other figures.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from adapters import demo_streams, first_tokens, loads_beside, popularity
from adapters.adapted_server import OF_DEVICE, SMALL, AdaptedServer, BenchSizes
from rig import Row
from scheduling.bench_scheduler import adapter_ratio

log = logging.getLogger(__name__)

SHARED = {"host": first_tokens.from_host_memory, "disk": first_tokens.from_disk, "loads": loads_beside.measure}
KINDS = (*SHARED, "zipf", "schedule", "cpu")
NUM_RUNNING, NUM_STEPS, NUM_ADAPTERS = 256, 3000, 64


def rows(kinds: list[str], model: str, flags: list[str], sizes: BenchSizes, limit_s: float) -> Iterator[Row]:
    """Yields each row once it is measured. Servers are killed when the limit is reached."""
    begin_s = time.monotonic()

    def left_s() -> float:
        return max(limit_s - (time.monotonic() - begin_s), 1.0)

    with tempfile.TemporaryDirectory() as folder:
        if shared := [kind for kind in kinds if kind in SHARED]:
            with AdaptedServer(model, flags, Path(folder), sizes, left_s) as served:
                for kind in shared:
                    yield from _measured(kind, lambda kind=kind: SHARED[kind](served))
        if "zipf" in kinds:
            with AdaptedServer(model, flags, Path(folder), sizes, left_s, is_popularity=True) as served:
                yield from _measured("zipf", lambda: popularity.measure(served))
    if "schedule" in kinds:
        yield from _measured("schedule", _schedule)
    if "cpu" in kinds:
        yield from _measured("cpu", demo_streams.measure)


def _measured(kind: str, measure: Callable[[], list[Row]]) -> Iterator[Row]:
    begin_s = time.monotonic()
    try:
        found = measure()
    except Exception as e:
        log.exception("%s failed", kind)
        lines = str(e).strip().splitlines() or [type(e).__name__]
        found = [(kind, f"failed: {' '.join([lines[0], *lines[1:][-1:]])}", "")]  # what, and the last of its log
    print(f"{kind}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr)
    yield from found


def _schedule() -> list[Row]:
    text = adapter_ratio(NUM_RUNNING, NUM_STEPS, NUM_ADAPTERS)
    return [(f"a step's schedule, {NUM_RUNNING} running with {NUM_ADAPTERS} adapters", text, "1.1 times")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="ROW", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--flags", default="", help="more flags of servers, as one argument")
    parser.add_argument("--small", action="store_true", help="the demo model on the CPU, with few requests")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which servers are killed")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: rows are {', '.join(KINDS)}")
    model, flags = options.model, options.flags.split()
    if options.small:
        model, flags = "demo", ["--device", "cpu", *flags]
    print("| what | measured | bar |\n|---|---|---|", flush=True)
    sizes = SMALL if options.small else OF_DEVICE
    for row in rows(options.kinds or list(KINDS), model, flags, sizes, options.limit):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
