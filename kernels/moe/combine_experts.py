"""The sum of each row's experts, in the order of its pairs, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_TILE = 1024


def combine_experts_reference(
    pairs: Tensor, top_k: int, shared: Tensor | None = None, experts: Tensor | None = None, num_experts: int = 0
) -> Tensor:
    if experts is not None:
        pairs = pairs.masked_fill((experts >= num_experts).view(-1, 1), 0)
    total = pairs.view(-1, top_k, pairs.shape[1]).float().sum(1)
    return (total if shared is None else total + shared.float()).to(pairs.dtype)


@triton.jit
def _combine_experts_kernel(
    pairs_ptr, shared_ptr, experts_ptr, out_ptr, size,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): tile j of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < size
    total = tl.zeros([TILE], tl.float32)
    for k in tl.static_range(TOP_K):
        there = inside
        if EXPERTS:
            there = cols < tl.where(tl.load(experts_ptr + row * TOP_K + k) < EXPERTS, size, 0)
        total += tl.load(pairs_ptr + (row * TOP_K + k) * size + cols, mask=there, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + row * size + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine_experts(
    pairs: Tensor, top_k: int, shared: Tensor | None = None, experts: Tensor | None = None, num_experts: int = 0
) -> Tensor:
    """pairs [rows * top_k, size], shared [rows, size] of the experts that all rows have -> [rows, size].

    experts [rows, top_k] int32: pairs of those from `num_experts` on are not read; None: all are.
    Raises ValueError for other shapes, dtypes and layouts.
    """
    num_pairs, size = pairs.shape
    rows = num_pairs // top_k
    if rows * top_k != num_pairs or (shared is not None and shared.shape != (rows, size)):
        raise ValueError(f"{num_pairs} pairs of {top_k} experts a row do not fit {rows} rows")
    if not pairs.is_contiguous() or (shared is not None and not shared.is_contiguous()):
        raise ValueError("operands must be contiguous")
    if shared is not None and shared.dtype != pairs.dtype:
        raise ValueError(f"dtypes differ: {pairs.dtype}, {shared.dtype}")
    if experts is not None and (experts.shape != (rows, top_k) or experts.dtype != torch.int32):
        raise ValueError(f"experts {list(experts.shape)} {experts.dtype} are not int32 {[rows, top_k]}")
    out = torch.empty((rows, size), dtype=pairs.dtype, device=pairs.device)
    if out.numel():
        pdl = supports_pdl(pairs.device)
        _combine_experts_kernel[(rows, ceil_div(size, _TILE))](
            pairs, pairs if shared is None else shared, pairs if experts is None else experts, out, size,
            TOP_K=top_k, SHARED=shared is not None, EXPERTS=0 if experts is None else num_experts, TILE=_TILE,
            PDL=pdl, **pdl_options(pdl),
        )  # fmt: skip
    return out
