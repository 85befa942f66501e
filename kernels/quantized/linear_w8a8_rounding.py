"""Linear layer of one or two rows that it rounds to e4m3 or int8 itself, with weights of 8 bits; on a GPU.

Every program has whole rows in registers: it normalises them (RMSNorm), finds their scales and rounds them, to the
codes that `quantize_rows` or `add_rms_norm_rounded` writes, as `linear_w8a8_skinny` would read them. That costs
instructions in each program and saves a kernel. A gate is not computed here: for the whole row it would take longer.

With `pdl` (programmatic dependent launch, compute capability 9.0) a program loads all of its weights while the kernel
that makes the rows still runs. It may read and write nothing else before the wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.layers.round_row import bound, check_rounding, group_of, is_bounded, rounded_row
from blockyard.kernels.layers.rounding import InputRounding
from blockyard.kernels.programmatic_launch import pdl_options
from blockyard.kernels.quantized.linear_w8a8_skinny import LANE, load_weights
from blockyard.kernels.quantized.operands import Weight8Bit, check_weight

MAX_ROWS = 2


def tile_of(size: int, group: int | None) -> int:
    """Inputs of a program, whole rows: a power of two."""
    return max(next_power_of_2(size), group or 0, LANE)


@triton.jit
def _rounded_inputs(
    x_ptr, norm_weight, scale_ptr, cols, size, eps, most,
    ROWS: tl.constexpr, INT8: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, BOUNDED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """What `rounded_row` makes of each row: tuples of codes and of scales."""
    codes = ()
    scales = ()
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * size + cols, mask=cols < size, other=0.0).to(tl.float32)
        if NORM:  # as `add_rms_norm` computes it, rounded to what other products read
            inverse = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
            x = (x * inverse * norm_weight).to(x_ptr.dtype.element_ty).to(tl.float32)
        code, scale = rounded_row(x, scale_ptr, most, INT8, GROUP, STATIC, BOUNDED)
        codes += (code,)  # type: ignore[assignment]
        scales += (scale,)  # type: ignore[assignment]
    return codes, scales


@triton.jit
def _lane_sums(weight, codes, out_ptr, out, outs, ROWS: tl.constexpr, LANE_SIZE: tl.constexpr, ADD: tl.constexpr):
    """Of each row, products summed by lane [OUT_TILE, LANES], and the output to be added to.

    Rows are multiplied beside each other, so that weights do not stay in registers as float32.
    """
    SUM: tl.constexpr = tl.int32 if weight.dtype == tl.int8 else tl.float32
    sums = ()
    before = ()
    for row in tl.static_range(ROWS):
        products = weight.to(SUM) * codes[row].to(SUM)[None, :]
        sums += (tl.sum(tl.reshape(products, [weight.shape[0], weight.shape[1] // LANE_SIZE, LANE_SIZE]), 2),)  # type: ignore[assignment]
        if ADD:
            before += (tl.load(out_ptr + row * outs + out, mask=out < outs, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return sums, before


@triton.jit
def _scaled(sums, weight_scale, by_row, scale, GROUP: tl.constexpr, LANE_SIZE: tl.constexpr):
    """Outputs [OUT_TILE] float32, from sums of lanes [OUT_TILE, LANES]. scale: of the input, or those of its groups."""
    LANES: tl.constexpr = sums.shape[1]
    if GROUP > 0:
        by_lane = tl.broadcast_to(scale[:, None], [LANES * LANE_SIZE // GROUP, GROUP // LANE_SIZE])
        return tl.sum(sums.to(tl.float32) * weight_scale * tl.reshape(by_lane, [LANES])[None, :], 1)
    else:  # noqa: RET505, only one branch is compiled
        return tl.sum(sums, 1).to(tl.float32) * (by_row * scale)


@triton.jit
def _linear_w8a8_rounding_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, weight_scale_ptr, bias_ptr, scale_ptr, out_ptr, outs, size, eps, most,
    ROWS: tl.constexpr, OUT_TILE: tl.constexpr, TILE: tl.constexpr, LANE_SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, STATIC: tl.constexpr, BOUNDED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: outputs i * OUT_TILE ... of all rows
    if PDL:
        gdc_launch_dependents()
    INT8: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    cols = tl.arange(0, TILE)
    lanes = tl.arange(0, TILE // LANE_SIZE) * LANE_SIZE
    inside = out < outs
    weights = weight_ptr + (out.to(tl.int64) * size)[:, None] + cols[None, :]
    groups = tl.cdiv(size, GROUP) if GROUP > 0 else 1
    # outputs of one block have one row of scales together
    out_block = tl.program_id(0) * OUT_TILE // BLOCK + tl.arange(0, 1) if BLOCK % OUT_TILE == 0 else out // BLOCK
    weight_scales = weight_scale_ptr + (out_block.to(tl.int64) * groups)[:, None]
    known_scales = (out_block < tl.cdiv(outs, BLOCK))[:, None]
    weight, weight_scale = load_weights(
        weights, weight_scales, inside[:, None], known_scales, 0, cols, lanes, size, GROUP
    )
    norm_weight = tl.zeros([TILE], tl.float32)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + cols, mask=cols < size, other=0.0).to(tl.float32)
    bias = tl.zeros([OUT_TILE], tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + out, mask=inside, other=0.0).to(tl.float32)
    by_row = tl.zeros([OUT_TILE], tl.float32) + 1.0
    if GROUP == 0:
        by_row = tl.load(weight_scale_ptr + out, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    codes, scales = _rounded_inputs(
        x_ptr, norm_weight, scale_ptr, cols, size, eps, most, ROWS, INT8, GROUP, STATIC, BOUNDED, NORM
    )
    sums, before = _lane_sums(weight, codes, out_ptr, out, outs, ROWS, LANE_SIZE, ADD)
    for row in tl.static_range(ROWS):
        y = _scaled(sums[row], weight_scale, by_row, scales[row], GROUP, LANE_SIZE)
        y += bias
        if ADD:
            y += before[row]
        tl.store(out_ptr + row * outs + out, y.to(out_ptr.dtype.element_ty), mask=inside)


def linear_w8a8_rounding(
    x: Tensor,
    rounding: InputRounding,
    weight: Weight8Bit,
    bias: Tensor | None,
    *,
    out_tile: int,
    warps: int,
    pdl: bool,
    norm: RMSNorm | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """x of at most MAX_ROWS rows [rows, in] in 16 or 32 bits, weight [out, in], bias [out] -> [rows, out].

    rounding: of x, which has the weight's dtype and groups. norm: x is normalised before; its weight may be float32.
    add_to [rows, out]: is increased by the product and returned. A program has `out_tile` outputs.
    Raises ValueError for other shapes, dtypes and layouts.
    """
    (rows, size), outs = x.shape, weight.codes.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are over {MAX_ROWS}")
    check_rounding(rounding)
    check_weight(size, weight, bias)
    if (rounding.dtype, rounding.group) != (weight.codes.dtype, weight.group) or not x.is_contiguous():
        raise ValueError(f"{rounding} does not fit the weight, or rows are not contiguous: strides {x.stride()}")
    if norm is not None and (norm.weight.shape != (size,) or norm.weight.dtype not in (x.dtype, torch.float32)):
        raise ValueError(f"the norm's {list(norm.weight.shape)} {norm.weight.dtype} does not fit {size} {x.dtype}")
    if add_to is not None and (add_to.shape != (rows, outs) or not add_to.is_contiguous() or add_to.dtype != x.dtype):
        raise ValueError(f"{list(add_to.shape)} {add_to.dtype} does not fit {[rows, outs]} {x.dtype}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if add_to is None else add_to
    if out.numel() == 0:
        return out
    _linear_w8a8_rounding_kernel[(ceil_div(outs, out_tile),)](
        x, x if norm is None else norm.weight, weight.codes, weight.scales, x if bias is None else bias,
        x if rounding.scale is None else rounding.scale, out, outs, size, 0.0 if norm is None else norm.eps,
        bound(rounding),
        ROWS=rows, OUT_TILE=out_tile, TILE=tile_of(size, weight.group), LANE_SIZE=LANE, GROUP=group_of(rounding),
        BLOCK=weight.block, STATIC=rounding.scale is not None, BOUNDED=is_bounded(rounding), BIAS=bias is not None,
        NORM=norm is not None, ADD=add_to is not None, PDL=pdl, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip
    return out
