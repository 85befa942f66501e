"""The norm of a sublayer's output, its sum with the residual and the next norms of that, in one pass; on a GPU.

For layers with norms behind sublayers: seven kernels of a layer with experts beside its MLP become one.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.layers.add_rms_norm import LONGEST_ROW
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

MOST_NORMS = 3  # of the sum


def norm_add_norm_reference(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    then: Sequence[Tensor] = (),
    *,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,
    factor: Tensor | None = None,
) -> list[Tensor]:
    def norm(row: Tensor, by: Tensor) -> Tensor:
        return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * by.double()

    total = x.double()
    if beside is not None:
        own, y, of_y = beside
        total = norm(total, own) + norm(y.double(), of_y)
    total = residual.double() + norm(total, weight)
    residual.copy_(total if factor is None else total * factor.double())
    return [norm(residual.double(), one).to(residual.dtype) for one in then]


@triton.jit
def _norm(x, weight_ptr, cols, inside, size, eps):
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight


@triton.jit(do_not_specialize=["rows"])
def _norm_add_norm_kernel(
    residual_ptr, x_ptr, weight_ptr, own_ptr, y_ptr, of_y_ptr, factor_ptr, then_0, then_1, then_2, out_ptr,
    residual_stride, x_stride, y_stride, rows, size, eps,
    BESIDE: tl.constexpr, FACTOR: tl.constexpr, NORMS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    inside = cols < size
    residual = residual_ptr + row * residual_stride + cols
    total = tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if BESIDE:
        y = tl.load(y_ptr + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
        x = _norm(x, own_ptr, cols, inside, size, eps) + _norm(y, of_y_ptr, cols, inside, size, eps)
    total += _norm(x, weight_ptr, cols, inside, size, eps)
    if FACTOR:
        total *= tl.load(factor_ptr).to(tl.float32)
    rounded = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual, rounded, mask=inside)
    if NORMS > 0:
        total = rounded.to(tl.float32)  # normalised as others read it, rounded
        out = out_ptr + row * size + cols
        step = rows.to(tl.int64) * size
        tl.store(out, _norm(total, then_0, cols, inside, size, eps), mask=inside)
        if NORMS > 1:
            tl.store(out + step, _norm(total, then_1, cols, inside, size, eps), mask=inside)
        if NORMS > 2:
            tl.store(out + 2 * step, _norm(total, then_2, cols, inside, size, eps), mask=inside)


def norm_add_norm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    then: Sequence[Tensor] = (),
    *,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,
    factor: Tensor | None = None,
) -> list[Tensor]:
    """residual [rows, size] becomes (residual + RMSNorm of x by weight [size]) * factor [1], in place.

    Returns its RMSNorm by each weight of `then`, at most MOST_NORMS, contiguous. beside: (own, y, of_y): instead of x,
    the sum of the norms of x by `own` and of y [rows, size] by `of_y` is normalised by weight. All norms have the same
    eps. Rows may be strided, weights in another dtype. Raises ValueError for other shapes, dtypes and layouts, and for
    rows over LONGEST_ROW.
    """
    rows, size = residual.shape
    own, y, of_y = (weight, x, weight) if beside is None else beside
    if size > LONGEST_ROW or len(then) > MOST_NORMS:
        raise ValueError(f"rows of {size} are longer than {LONGEST_ROW}, or {len(then)} norms more than {MOST_NORMS}")
    for operand in (x, y):
        if operand.shape != residual.shape or operand.dtype != residual.dtype:
            raise ValueError(f"{list(operand.shape)} {operand.dtype} does not fit the residual {list(residual.shape)}")
    if not all(one.shape == (size,) and one.is_contiguous() for one in (weight, own, of_y, *then)):
        raise ValueError(f"the weights of norms must be contiguous and have {size} elements")
    if factor is not None and factor.shape != (1,):
        raise ValueError(f"the factor must be [1], got {list(factor.shape)}")
    if any(operand.stride(1) != 1 for operand in (residual, x, y)):
        raise ValueError("the elements of a row must be contiguous")
    out = torch.empty((len(then), rows, size), dtype=residual.dtype, device=residual.device)
    if rows and size:
        tile, pdl = next_power_of_2(size), supports_pdl(residual.device)
        weights = [*then, *[weight] * (MOST_NORMS - len(then))]
        _norm_add_norm_kernel[(rows,)](
            residual, x, weight, own, y, of_y, weight if factor is None else factor, *weights, out,
            residual.stride(0), x.stride(0), y.stride(0), rows, size, eps,
            BESIDE=beside is not None, FACTOR=factor is not None, NORMS=len(then), TILE=tile, PDL=pdl,
            num_warps=min(max(tile // 512, 1), 16), **pdl_options(pdl),
        )  # fmt: skip
    return list(out.unbind(0))
