"""Attention of heads of 512 numbers is compiled for an H100: its tiles fit the shared memory."""

import os
import subprocess
import sys
from pathlib import Path

# In another process, because Triton runs its interpreter in this one.
COMPILE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoGPU:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(NoGPU())
from triton.runtime.jit import JITFunction
from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.paged_decode import paged_decode
from blockyard.kernels.attention.paged_prefill import paged_prefill
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

run = JITFunction.run

def only_compile(function, *args, grid, warmup, **options):
    kernel = run(function, *args, grid=grid, warmup=True, **options)
    print(function.__name__.strip("_"), kernel.metadata.shared)

JITFunction.run = only_compile
ids, starts = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2], dtype=torch.int32)
seqs = PagedKVMetadata(ids, ids, torch.zeros(2, 4, dtype=torch.int32))
heads, kv_heads, dim = 16, 2, 512  # of Gemma 4 26B-A4B
q, layer = torch.zeros(2, heads, dim).bfloat16(), torch.zeros(8, 2, kv_heads, 16, dim).bfloat16()
out = torch.zeros(2, heads * dim).bfloat16()
paged_decode(q, layer, seqs, 1.0, None, 4096)
paged_prefill(q, layer, seqs, starts, 1.0, None, 64, out)
batch_invariant_attention(q, layer, seqs, starts, 1.0, None, 4096, out, True)
"""
SHARED = 227 * 1024  # bytes of a multiprocessor
PROGRAMS = {"paged_decode_kernel": 4, "paged_prefill_kernel": 1}  # that run at a time on a multiprocessor


def test_heads_of_512_numbers_compile_for_an_h100(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[3] / ".src"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE], env=env, capture_output=True, text=True, timeout=170, check=False
    )
    assert run.returncode == 0, run.stderr
    shared = {name: int(size) for name, size in map(str.split, run.stdout.splitlines())}
    assert len(shared) >= 4
    assert all(PROGRAMS.get(name, 1) * size <= SHARED for name, size in shared.items()), shared
