"""Compiles kernels for an H100 without a GPU, in another process, because Triton runs its interpreter in this one."""

import os
import subprocess
import sys
from pathlib import Path

SHARED = 227 * 1024  # bytes of a multiprocessor
SOURCE = Path(__file__).parents[2] / ".src"
# Every launch of a kernel only compiles it, and prints its name and its bytes of shared memory.
ONLY_COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoGPU:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(NoGPU())
from triton.runtime.jit import JITFunction

run = JITFunction.run

def only_compile(function, *args, grid, warmup, **options):
    kernel = run(function, *args, grid=grid, warmup=True, **options)
    print(function.__name__.strip("_"), kernel.metadata.shared)

JITFunction.run = only_compile
"""


def shared_bytes(launches: str, cache: Path, timeout_s: float) -> list[tuple[str, int]]:
    """The kernels that these lines of Python launch on CPU tensors, in order, each with its bytes of shared memory.

    cache: an empty folder.
    """
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-P", "-c", ONLY_COMPILE + launches]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert run.returncode == 0, run.stderr
    return [(name, int(size)) for name, size in map(str.split, run.stdout.splitlines())]
