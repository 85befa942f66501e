"""The gated activation of an MLP, silu(gate) * up, on a GPU."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_TILE = 1024


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride, inner, TILE: tl.constexpr, PDL: tl.constexpr):
    # program (i, j): tile j of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < inner
    gate = tl.load(gate_up_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + inner + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * inner + cols, gate / (1 + tl.exp(-gate)) * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [rows, 2 * inner], the gate first, rows may be strided -> [rows, inner] contiguous.

    Raises ValueError for another rank, an odd width, and elements of a row that are not contiguous.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"expected [rows, 2 * inner], got {list(gate_up.shape)}")
    if gate_up.stride(1) != 1:
        raise ValueError(f"the elements of a row must be contiguous, got strides {gate_up.stride()}")
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid, pdl = (rows, ceil_div(inner, _TILE)), supports_pdl(gate_up.device)
        stride = gate_up.stride(0)
        _silu_mul_kernel[grid](gate_up, out, stride, inner, TILE=_TILE, PDL=pdl, **pdl_options(pdl))
    return out
