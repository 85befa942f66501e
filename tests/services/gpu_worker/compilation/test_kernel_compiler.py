"""Kernels compiled in other processes, for a GPU that is absent: Triton can compile for it without having it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# In another process, because Triton runs its interpreter in this one.
SCRIPT = """
import sys, threading
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoGPU:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(NoGPU())
from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.kernels.layers.act_mul import act_mul
from blockyard.services.gpu_worker.compilation import compile_processes
from blockyard.services.gpu_worker.compilation.kernel_compiler import KernelCompiler

def launch(rows):
    x = torch.ones(rows, 64, dtype=torch.bfloat16)
    add_rms_norm(x, None, x[0].clone(), 1e-6)
    assert bool((x == 1).all()), "nothing ran"

def hits(call):
    found = []
    triton.knobs.compilation.listener = lambda **facts: found.append(facts["cache_hit"])
    try:
        call()
    except AttributeError:
        pass  # there is no GPU to load it
    return found

mode = sys.argv[1]
if mode == "broken":
    compile_processes.MODULE = "blockyard.services.gpu_worker.no_such_module"
compiler = KernelCompiler(compile_processes.CompileProcesses(2))
with compiler.recording():
    for _ in range(3):
        launch(4)
        launch(32)
assert compiler.wait(60.0)
print(compiler.describe().partition(" in ")[0])
print(hits(lambda: launch(4)), hits(lambda: launch(32)))
with compiler.recording():
    launch(4)  # this process has it by now: it would be launched, and there is no GPU
print(compiler.has_compiled("everything"))
compiler.mark_compiled("everything")
compiler.close()
for thread in threading.enumerate():
    if thread.name.startswith("compile-"):
        thread.join(20.0)
        assert not thread.is_alive()
"""


def run(mode: str, cache: Path) -> list[str]:
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    env.pop("TRITON_INTERPRET", None)
    # The compile processes need PYTHONPATH too, if packages are found by it.
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[4] / ".src"), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, mode], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The cache as it leaves it, and what it printed."""
    folder = tmp_path_factory.mktemp("triton")
    return folder, run("first", folder)


@pytest.fixture(scope="module")
def cache(first_start: tuple[Path, list[str]]) -> Path:
    return first_start[0]


def test_recorded_kernels_are_found_in_tritons_cache(first_start: tuple[Path, list[str]]) -> None:
    assert first_start[1] == ["kernels: 1 compiled", "[True] []", "False"], "rows do not specialize this kernel"


def test_a_second_start_compiles_nothing(cache: Path) -> None:
    assert run("second", cache) == ["kernels: compiled before", "[True] []", "True"]


def test_a_copied_cache_is_used_at_its_new_path(cache: Path, tmp_path: Path) -> None:
    """A container image may be built so: the cache has another path, and the original is gone."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(cache, copy)
    hidden = cache.rename(cache.with_name("gone"))
    try:
        assert run("copied", copy) == ["kernels: compiled before", "[True] []", "True"]
    finally:
        hidden.rename(cache)


def test_if_compile_processes_do_not_start_the_first_launch_compiles(tmp_path: Path) -> None:
    assert run("broken", tmp_path)[1] == "[False] []"
