"""RMSNorm of the heads of q or k, which may be strided, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_TILE = 4  # heads a program, one for each warp: a head is rounded alike whatever the number of rows


def norm_heads_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@triton.jit
def _norm_heads_kernel(
    x_ptr, weight_ptr, out_ptr, row_stride, head_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): TILE heads of row i
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    dims = tl.arange(0, DIM)[None, :]
    inside = (heads < HEADS) & (dims < HEAD_DIM)
    weight = tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * row_stride + heads * head_stride + dims, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
    tl.store(out_ptr + (row * HEADS + heads) * HEAD_DIM + dims, x * scale[:, None] * weight, mask=inside)


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises x [rows, heads, head_dim] by weight [head_dim]. Returns a new tensor, contiguous.

    Rows and heads may be strided. The weight may be float32 where x is not. Raises ValueError for other shapes and
    dtypes.
    """
    rows, heads, head_dim = x.shape
    if weight.shape != (head_dim,) or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight {list(weight.shape)} {weight.dtype} does not fit {list(x.shape)} {x.dtype}")
    if x.stride(2) != 1 or not weight.is_contiguous():
        raise ValueError("the numbers of a head must be contiguous")
    out = torch.empty((rows, heads, head_dim), dtype=x.dtype, device=x.device)
    if out.numel():
        pdl = supports_pdl(x.device)
        _norm_heads_kernel[(rows, ceil_div(heads, _TILE))](
            x, weight, out, x.stride(0), x.stride(1), eps,
            HEADS=heads, HEAD_DIM=head_dim, DIM=next_power_of_2(head_dim), TILE=_TILE, PDL=pdl,
            num_warps=_TILE, **pdl_options(pdl),
        )  # fmt: skip
    return out
