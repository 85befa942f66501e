"""`blockyard bench kernels`: the worker's own benchmark in a process of its own, which loads torch."""

import subprocess
import sys
from collections.abc import Sequence

USAGE = """\
usage: blockyard bench kernels [FAMILY ...]

Measures the GPU's ceilings, then the worker's kernels in CUDA graphs with inputs that no cache holds, and prints a
table: kernel, shape, us, rate, share of the ceiling. Without names all families are measured."""


def main(args: Sequence[str]) -> int:
    """The child's exit code: 2 without a GPU or for an unknown family."""
    if {"-h", "--help"} & {*args}:
        print(USAGE)
        return 0
    command = [sys.executable, "-P", "-m", "blockyard.services.gpu_worker.bench", *args]
    return subprocess.run(command, check=False).returncode
