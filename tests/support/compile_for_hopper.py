"""Compiles kernels for an H100 without a GPU, in another process, because Triton runs its interpreter in this one.

All tests of this process share the other one (`Forks`), which has loaded torch and Triton.
Triton finds kernels that are as in an earlier run in its cache.
"""

import functools
import os
from pathlib import Path

from forks import Forks

SHARED = 227 * 1024  # bytes of a multiprocessor
ROOT = Path(__file__).parents[2]
SOURCE, CACHE = ROOT / ".src", ROOT / ".pytest_cache" / "triton"
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
triton.knobs.runtime.jit_cache_hook = lambda **launch: False  # Triton describes each launch, as for a start's compilers
from triton.runtime.jit import JITFunction

run = JITFunction.run

def only_compile(function, *args, grid, warmup, **options):
    kernel = run(function, *args, grid=grid, warmup=True, **options)
    print(function.__name__.strip("_"), kernel.metadata.shared)
    return kernel

JITFunction.run = only_compile
"""


@functools.cache
def _forks() -> Forks:
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "PYTHONPATH": path,
        "TRITON_CACHE_DIR": str(CACHE),
        "TRITON_STORE_BINARY_ONLY": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return Forks(ONLY_COMPILE, env)


def shared_bytes(launches: str, folder: Path) -> list[tuple[str, int]]:
    """The kernels that these lines of Python launch on CPU tensors, in order, each with its bytes of shared memory.

    folder: an empty one.
    """
    lines = _forks().run(launches, folder).splitlines()
    return [(name, int(size)) for name, size in map(str.split, lines)]
