"""Compiles kernels for an H100 without a GPU, in another process, because Triton runs its interpreter in this one.

All tests of this process share the other one, which has loaded torch and Triton: each list of launches is a fork of it.
Triton finds kernels that are as in an earlier run in its cache.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

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
from triton.runtime.jit import JITFunction

run = JITFunction.run

def only_compile(function, *args, grid, warmup, **options):
    kernel = run(function, *args, grid=grid, warmup=True, **options)
    print(function.__name__.strip("_"), kernel.metadata.shared)
    return kernel

JITFunction.run = only_compile
"""


SERVE = """
import json, os, sys, traceback

for line in sys.stdin:
    launches, folder = json.loads(line)
    pid = os.fork()
    if pid:
        print(os.waitpid(pid, 0)[1], flush=True)
        continue
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), number)
    try:
        exec(launches, globals())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
"""


@functools.cache
def _server() -> tuple[IO[str], IO[str]]:
    """The input and the output of the process, which ends with this one."""
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(CACHE), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [sys.executable, "-P", "-c", ONLY_COMPILE + SERVE]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    assert server.stdin is not None and server.stdout is not None
    return server.stdin, server.stdout


def shared_bytes(launches: str, folder: Path) -> list[tuple[str, int]]:
    """The kernels that these lines of Python launch on CPU tensors, in order, each with its bytes of shared memory.

    folder: an empty one.
    """
    requests, answers = _server()
    print(json.dumps([launches, str(folder)]), file=requests, flush=True)
    status = answers.readline().strip()
    assert status == "0", (folder / "errors").read_text("utf-8")
    lines = (folder / "output").read_text("utf-8").splitlines()
    return [(name, int(size)) for name, size in map(str.split, lines)]
