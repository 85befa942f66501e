"""`blockyard bench WHAT`."""

import importlib
from collections.abc import Callable, Sequence

from blockyard.shared.errors import ConfigError

USAGE = """\
usage: blockyard bench serve [flags]                    a running server: its TTFT, TPOT, ITL, throughput, goodput
       blockyard bench latency [MODEL] [flags]          batches through `blockyard.LLM`, without HTTP
       blockyard bench throughput [MODEL] [flags]       many prompts through `blockyard.LLM`, without HTTP
       blockyard bench kernels [FAMILY ...]             the GPU's kernels: time, rate, share of the ceiling
       blockyard bench suite [ITEM ...] [flags]         the figures Blockyard is held to, with bars and floors

`--help` after any of them lists its flags and says how its figures are defined."""

BENCHES = {
    "serve": "blockyard.services.launcher.bench.serve:main",
    "latency": "blockyard.services.launcher.bench.offline:latency",
    "throughput": "blockyard.services.launcher.bench.offline:throughput",
    "kernels": "blockyard.services.launcher.bench.kernels:main",
    "suite": "blockyard.services.launcher.bench.suite.command:main",
}


def main(args: Sequence[str]) -> int:
    """Returns the exit code. Raises BlockyardError."""
    what, *rest = args or ["--help"]
    if what in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if what not in BENCHES:
        raise ConfigError(f"{what}: no such benchmark; there is {', '.join(BENCHES)}")
    module, _, name = BENCHES[what].partition(":")
    run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name)
    return run(rest)
