"""`blockyard bench WHAT`: dispatches to the benchmarks."""

import os
import sys
from collections.abc import Callable, Sequence

from blockyard.services.bench import latency_throughput, serve
from blockyard.services.bench.parallel import command as parallel
from blockyard.services.bench.prefill_decode import command as prefill_decode
from blockyard.services.bench.suite import command as suite
from blockyard.shared.errors import ConfigError

USAGE = """\
usage: blockyard bench serve [flags]                    a running server: its TTFT, TPOT, ITL, throughput, goodput
       blockyard bench latency [MODEL] [flags]          batches through `blockyard.LLM`, without HTTP
       blockyard bench throughput [MODEL] [flags]       many prompts through `blockyard.LLM`, without HTTP
       blockyard bench kernels [FAMILY ...]             the GPU's kernels: time, rate, share of the ceiling
       blockyard bench suite [ITEM ...] [flags]         performance figures of this GPU, with targets and floors
       blockyard bench pd [ITEM ...] [flags]            two GPUs: prefill and decode apart against unified workers
       blockyard bench parallel MODEL [ITEM ...]        several GPUs, as --layouts or a table say, against one

`--help` after any of them lists its flags and defines its figures."""

KERNELS_USAGE = """\
usage: blockyard bench kernels [FAMILY ...]

Measures the GPU's ceilings, then the worker's kernels in CUDA graphs with inputs that no cache holds, and prints a
table: kernel, shape, us, rate, share of the ceiling. Without names all families are measured."""


def main(args: Sequence[str]) -> int:
    """Returns the exit code. Raises BlockyardError."""
    what, *rest = args or ["--help"]
    if what in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if what not in BENCHES:
        raise ConfigError(f"{what}: no such benchmark; the benchmarks are {', '.join(BENCHES)}")
    return BENCHES[what](rest)


def kernels(args: Sequence[str]) -> int:
    """`blockyard bench kernels`: replaces this process with the worker's benchmark, which loads torch.

    Its exit code is 2 without a GPU or for an unknown family.
    """
    if not {"-h", "--help"} & {*args}:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "blockyard.services.gpu_worker.bench", *args])
    print(KERNELS_USAGE)
    return 0


BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": serve.main,
    "latency": latency_throughput.latency,
    "throughput": latency_throughput.throughput,
    "kernels": kernels,
    "suite": suite.main,
    "pd": prefill_decode.main,
    "parallel": parallel.main,
}
