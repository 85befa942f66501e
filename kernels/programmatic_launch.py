"""Programmatic dependent launch (PDL), from compute capability 9.0 on: a kernel begins while the one before it ends.

A kernel launched so calls `gdc_launch_dependents` at once, so that the next kernel may be set up and load what no
kernel writes (weights). It calls `gdc_wait` before it reads or writes anything else. At least one of its programs must
wait, because the next kernel takes its end for the end of everything before it. A kernel may announce the next one
after its own wait instead: then everything before it has ended when the next one begins.

A kernel that does not announce the next one has ended when that one begins, and all later ones. What it wrote may be
read before a wait: so kernels of adapters read tiles, which `map_experts` makes for them without PDL.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from blockyard.kernels.gpu_facts import compute_capability


def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and compute_capability(device) >= (9, 0)


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel, beside its own PDL argument."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def wait_for_work(has_work):
    """Waits in programs that have work, and in the first one: others may end at once and leave their room to the next
    kernel, which takes the end of all programs for the end of everything before it."""
    if has_work | (tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0):
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Fetches the cache lines of these pointers to the L2 cache, for a kernel that waits for the one before."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
