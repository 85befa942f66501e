"""Sums over ranks compile for an H100, with dependent launches, and move 16 bytes at a time.

All warps of a program load its number of sums before one stores the next: otherwise a warp that is late takes the
other half of the buffers, and its words are lost.
"""

from pathlib import Path

from compile_for_hopper import SHARED, shared_bytes

LAUNCHES = """
from blockyard.kernels.all_reduce import one_step, two_step
from blockyard.kernels.all_reduce.peer_buffers import make_buffers
from blockyard.kernels.all_reduce.sum_ranks import sum_add_rms_norm, sum_ranks

triton.knobs.compilation.always_compile = True  # the cache has no PTX, which is looked at
triton.knobs.compilation.store_binary_only = False
one_step.supports_pdl = two_step.supports_pdl = lambda device: True

def buffers(num_ranks):
    return make_buffers(0, [0] * num_ranks, 1 << 24, torch.device("cpu"))

def only_compile_wide(function, *args, grid, warmup, **options):
    kernel = run(function, *args, grid=grid, warmup=True, **options)
    lines = kernel.asm["ptx"].splitlines()
    loads = [line for line in lines if "ld.volatile.global" in line]
    assert loads and all(".v4." in line for line in loads), loads
    assert sum("griddepcontrol" in line for line in lines) == 2
    begun = next(i for i, line in enumerate(lines) if "griddepcontrol.wait" in line)
    behind = [name for line in lines[begun:] for name in ("ld.global.b32", "bar.sync", "st.global") if name in line]
    assert behind[: behind.index("st.global")] == ["ld.global.b32", "ld.global.b32", "bar.sync"], behind[:8]
    print(function.__name__.strip("_"), kernel.metadata.shared)

JITFunction.run = only_compile_wide
rows = torch.zeros(3, 4096, dtype=torch.bfloat16)
sum_ranks(rows, buffers(2))
sum_add_rms_norm(rows, rows.clone(), rows[0], 1e-5, buffers(2))
rows = rows.float()
sum_add_rms_norm(rows, rows.clone(), rows[0], 1e-5, buffers(4), None, True)
"""


def test_compile_for_hopper(tmp_path: Path) -> None:
    compiled = shared_bytes(LAUNCHES, tmp_path)
    assert [name for name, _ in compiled] == ["one_step_kernel", "one_step_kernel", "two_step_kernel"]
    assert all(size < SHARED for _, size in compiled)
