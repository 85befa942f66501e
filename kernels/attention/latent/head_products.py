"""Products that have a matrix for each head, by which latent attention absorbs its up-projections; on a GPU.

A program computes one tile of one head. Sums run over the input in the same order for every number of rows. Where there
are few, the kernel starts while the kernel before it ends (programmatic dependent launch) and loads its weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_FEWEST = 2  # rows: without tensor cores where the inputs of weights are adjacent
_MOST_INNER = 512  # inputs that a program holds without tensor cores
_FEW = 32  # rows: weights are read once by tiles of 16 rows
_FEW_ROWS, _MANY_ROWS = 16, 64  # rows of a tile
_FEW_INNER, _INNER = 128, 64  # inputs at a time
_OUT = 64  # outputs of a tile
_FEW_OUT, _FEWEST_OUT = 32, 16  # outputs of a tile where there are few rows: more programs read the weights
_FEW_PROGRAMS = 128  # fewer take the smaller tile
_EARLY = 4  # tiles of weights that a program loads before it waits for the kernel before it
_EARLY_ROWS = 64  # at most: more programs would wait in the place of programs of the kernel before


def head_products_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("rhk,hkn->rhn", x, weight)


@triton.jit(do_not_specialize=["rows"])
def _head_products_kernel(
    x_ptr, weight_ptr, out_ptr, rows, x_row, x_head, weight_head, weight_in, weight_out, out_row, out_head,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j, k): outputs j of head i and rows k; EARLY tiles of weights are loaded before the wait
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x_places = x_ptr + row[:, None] * x_row + head * x_head + inner[None, :]
    weight_places = weight_ptr + head * weight_head + inner[:, None] * weight_in + columns[None, :] * weight_out
    early = ()
    for i in tl.static_range(EARLY):
        inside = (i * BLOCK_K + inner < IN)[:, None] & (columns < OUT)[None, :]
        early += (tl.load(weight_places + i * BLOCK_K * weight_in, mask=inside, other=0.0),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    early_x = ()
    for i in tl.static_range(EARLY):
        in_x = (row < rows)[:, None] & (i * BLOCK_K + inner < IN)[None, :]
        early_x += (tl.load(x_places + i * BLOCK_K, mask=in_x, other=0.0),)  # type: ignore[assignment]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(EARLY):
        acc = tl.dot(early_x[i], early[i], acc=acc, input_precision="ieee")
    for start in range(EARLY * BLOCK_K, IN, BLOCK_K):
        x = tl.load(x_places + start, mask=(row < rows)[:, None] & (start + inner < IN)[None, :], other=0.0)
        inside = (start + inner < IN)[:, None] & (columns < OUT)[None, :]
        weight = tl.load(weight_places + start * weight_in, mask=inside, other=0.0)
        acc = tl.dot(x, weight, acc=acc, input_precision="ieee")
    out_places = out_ptr + row[:, None] * out_row + head * out_head + columns[None, :]
    tl.store(out_places, acc, mask=(row < rows)[:, None] & (columns < OUT)[None, :])


@triton.jit
def _few_head_products_kernel(
    x_ptr, weight_ptr, out_ptr, x_row, x_head, weight_head, weight_out, out_row, out_head,
    ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): outputs j of head i, all rows, without tensor cores; inputs of weights are adjacent
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    columns, inner = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    places = weight_ptr + head * weight_head + columns[:, None] * weight_out + inner[None, :]
    weight = tl.load(places, mask=(columns < OUT)[:, None] & (inner < IN)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    weight = weight.to(tl.float32)
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * x_row + head * x_head + inner, mask=inner < IN, other=0.0).to(tl.float32)
        y = tl.sum(weight * x[None, :], 1)
        tl.store(out_ptr + row * out_row + head * out_head + columns, y, mask=columns < OUT)


def head_products(x: Tensor, weight: Tensor, batch_invariant: bool = False, out: Tensor | None = None) -> Tensor:
    """x [rows, heads, in], weight [heads, in, out] -> out [rows, heads, out], allocated if None.

    x and weight may be strided; the numbers of a head of x must be contiguous, and either axis of weight's matrices.
    batch_invariant: a row has the same bits whatever the number of rows. Raises ValueError for other shapes and dtypes.
    """
    rows, heads, size = x.shape
    out_size = weight.shape[2]
    if weight.shape[:2] != (heads, size) or weight.dtype != x.dtype or x.stride(2) != 1 or 1 not in weight.stride()[1:]:
        raise ValueError(
            f"x {list(x.shape)} {x.dtype} {x.stride()} does not fit {list(weight.shape)} {weight.dtype} "
            f"{weight.stride()}"
        )
    if out is None:
        out = x.new_empty((rows, heads, out_size))
    if out.shape != (rows, heads, out_size) or out.dtype != x.dtype or out.stride(2) != 1:
        raise ValueError(f"out {list(out.shape)} {out.dtype} {out.stride()} does not fit {[rows, heads, out_size]}")
    if not out.numel():
        return out
    if rows <= _FEWEST and weight.stride(1) == 1 and size <= _MOST_INNER and not batch_invariant:
        pdl = supports_pdl(x.device)
        _few_head_products_kernel[(heads, ceil_div(out_size, _FEWEST_OUT))](
            x, weight, out, x.stride(0), x.stride(1), weight.stride(0), weight.stride(2), out.stride(0), out.stride(1),
            ROWS=rows, IN=size, OUT=out_size, BLOCK_N=_FEWEST_OUT, BLOCK_K=next_power_of_2(size), PDL=pdl, num_warps=4,
            **pdl_options(pdl),
        )  # fmt: skip
        return out
    is_few = rows <= _FEW and not batch_invariant
    is_early = rows <= _EARLY_ROWS and not batch_invariant
    pdl = is_early and supports_pdl(x.device)
    block_m, block_n, inner = (_FEW_ROWS, _FEW_OUT, _FEW_INNER) if is_few else (_MANY_ROWS, _OUT, _INNER)
    if is_few and heads * ceil_div(out_size, block_n) < _FEW_PROGRAMS:
        block_n = _FEWEST_OUT
    block_k = min(inner, max(next_power_of_2(size), 16))
    _head_products_kernel[(heads, ceil_div(out_size, block_n), ceil_div(rows, block_m))](
        x, weight, out, rows, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
        IN=size, OUT=out_size, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        EARLY=min(_EARLY, ceil_div(size, block_k)) if is_early else 0, PDL=pdl, num_warps=4, num_stages=3,
        **pdl_options(pdl),
    )  # fmt: skip
    return out
