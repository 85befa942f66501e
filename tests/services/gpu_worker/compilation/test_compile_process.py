"""A process that compiles knows every kernel that a step launches."""

import os
import re
import subprocess
import sys
from pathlib import Path

from blockyard import kernels
from blockyard.services.gpu_worker.compilation.compile_processes import MODULE

ROOT = Path(kernels.__file__).parent
# No step launches these, so they are not compiled ahead: `kv_transfer` does.
IN_NO_STEP = {"block_checksum_triton.py", "copy_blocks.py", "move_blocks.py"}

# In another process, because Triton runs its interpreter in this one.
SCRIPT = """
import sys
from blockyard.services.gpu_worker.compilation.compile_process import find_kernel

for name in sys.argv[1:]:
    try:
        find_kernel(name)
    except LookupError as e:
        print(e)
"""


def kernel_names() -> list[str]:
    """Full names of all Triton functions of steps, as Triton names them."""
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.name not in IN_NO_STEP:
            module = ".".join(("blockyard.kernels", *path.relative_to(ROOT).with_suffix("").parts))
            found = re.findall(r"^@triton\.jit.*\ndef (\w+)\(", path.read_text("utf-8"), re.MULTILINE)
            names += [f"{module}.{name}" for name in found]
    return names


def environment() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parents[1]), os.environ.get("PYTHONPATH", "")])}
    env.pop("TRITON_INTERPRET", None)
    return env


def test_it_ends_in_silence_when_its_worker_has_ended() -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.write(b'{"name": "a kernel that is compiled when the worker ends"}\n')
    process.stdin.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_every_kernel_of_a_step_is_found_by_its_name() -> None:
    names = kernel_names()
    assert len(names) > 30 and "blockyard.kernels.layers.act_mul._act_mul_kernel" in names
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *names],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
