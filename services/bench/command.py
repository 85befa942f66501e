"""`blockyard bench WHAT`: dispatches to the benchmarks."""

import os
import sys
from collections.abc import Callable, Sequence

from blockyard.services.bench import serve
from blockyard.services.bench.prefill_decode import command as prefill_decode
from blockyard.shared.errors import ConfigError

USAGE = """\
usage: blockyard bench serve [flags]                    a running server: its TTFT, TPOT, ITL, throughput, goodput
       blockyard bench latency [MODEL] [flags]          batches through `blockyard.LLM`, without HTTP
       blockyard bench throughput [MODEL] [flags]       many prompts through `blockyard.LLM`, without HTTP
       blockyard bench kernels [FAMILY ...]             the GPU's kernels: time, rate, share of the ceiling
       blockyard bench suite [ITEM ...] [flags]         performance figures of this GPU, with targets and floors
       blockyard bench pd [ITEM ...] [flags]            two GPUs: prefill and decode apart against unified workers
       blockyard bench parallel MODEL [ITEM ...]        several GPUs, as --layouts says, against one

`--help` after any of them lists its flags and defines its figures."""

KERNELS_USAGE = """\
usage: blockyard bench kernels [FAMILY ...]

Measures the GPU's ceilings, then the worker's kernels in CUDA graphs with inputs that no cache holds, and prints a
table: kernel, shape, us, rate, share of the ceiling. Without names all families are measured."""

BENCHES = ("serve", "latency", "throughput", "kernels", "suite", "pd", "parallel")


def main(args: Sequence[str]) -> int:
    """Returns the exit code. Raises BlockyardError."""
    what, *rest = args or ["--help"]
    if what in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if what not in BENCHES:
        raise ConfigError(f"{what}: no such benchmark; the benchmarks are {', '.join(BENCHES)}")
    return _main_of(what)(rest)


def _main_of(what: str) -> Callable[[Sequence[str]], int]:
    match what:
        case "serve":
            return serve.main
        case "pd":
            return prefill_decode.main
        case "kernels":
            return kernels
        case _:
            return _engine_command(what)


def _engine_command(what: str) -> Callable[[Sequence[str]], int]:
    # it loads tokenizers, whose memory and time the load of `serve` would share
    from blockyard.services.bench import engine_commands  # noqa: PLC0415

    return engine_commands.MAINS[what]


def kernels(args: Sequence[str]) -> int:
    """`blockyard bench kernels`: replaces this process with the worker's benchmark, which loads torch.

    Its exit code is 2 without a GPU or for an unknown family.
    """
    if not {"-h", "--help"} & {*args}:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "blockyard.services.gpu_worker.bench", *args])
    print(KERNELS_USAGE)
    return 0
