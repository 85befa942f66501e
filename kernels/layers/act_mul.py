"""The gated activation of an MLP, activation(gate) * up, on a GPU."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.round_row import (
    allocate,
    bound,
    check_rounding,
    group_of,
    is_bounded,
    scales_stride,
    static_scale,
    store_rounded,
)
from blockyard.kernels.layers.rounding import InputRounding, RoundedRows
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # the kernel knows them by their place
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}
_TILE = 1024
_SQRT_HALF, _SQRT_8_OVER_PI = math.sqrt(0.5), math.sqrt(8 / math.pi)


def act_mul_reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr, SQRT_HALF: tl.constexpr, SQRT_8_OVER_PI: tl.constexpr):
    if ACTIVATION == 0:
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == 1:
        x = 0.5 * x * (1 + tl.math.erf(x * SQRT_HALF))
    elif ACTIVATION == 2:  # (1 + tanh(z)) / 2 is the sigmoid of 2z
        x = x / (1 + tl.exp(tl.minimum(-SQRT_8_OVER_PI * (x + 0.044715 * x * x * x), 80.0)))  # no overflow
    else:
        x = tl.maximum(x, 0.0)
        if ACTIVATION == 4:
            x = x * x
    return x


@triton.jit
def _act_mul_kernel(
    gate_up_ptr, out_ptr, stride, inner,
    ACTIVATION: tl.constexpr, SQRT_HALF: tl.constexpr, SQRT_8_OVER_PI: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): tile j of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < inner
    gate = tl.load(gate_up_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + inner + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * inner + cols, _activate(gate, ACTIVATION, SQRT_HALF, SQRT_8_OVER_PI) * up, mask=inside)


@triton.jit(do_not_specialize=["scales_stride"])
def _act_mul_rounded_kernel(
    gate_up_ptr, codes_ptr, scales_ptr, scale_ptr, stride, inner, scales_stride, most,
    ACTIVATION: tl.constexpr, SQRT_HALF: tl.constexpr, SQRT_8_OVER_PI: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, STATIC: tl.constexpr, BOUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: row i, because its largest number is needed first
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    inside = cols < inner
    gate = tl.load(gate_up_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + inner + cols, mask=inside, other=0.0).to(tl.float32)
    x = (_activate(gate, ACTIVATION, SQRT_HALF, SQRT_8_OVER_PI) * up).to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    store_rounded(x, codes_ptr, scales_ptr, scale_ptr, row, inner, scales_stride, most, TILE, GROUP, STATIC, BOUNDED)


def act_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """gate_up [rows, 2 * inner], the gate first, rows may be strided -> [rows, inner] contiguous.

    activation: one of `ACTIVATIONS`. Raises ValueError for another one, another rank, an odd width, and elements of a
    row that are not contiguous.
    """
    _check(gate_up, activation)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid, pdl = (rows, ceil_div(inner, _TILE)), supports_pdl(gate_up.device)
        _act_mul_kernel[grid](
            gate_up, out, gate_up.stride(0), inner, ACTIVATION=_NUMBERS[activation], SQRT_HALF=_SQRT_HALF,
            SQRT_8_OVER_PI=_SQRT_8_OVER_PI, TILE=_TILE, PDL=pdl, **pdl_options(pdl),
        )  # fmt: skip
    return out


def act_mul_rounded(gate_up: Tensor, activation: str, rounding: InputRounding) -> RoundedRows:
    """Same as `act_mul`, but returns its result as `quantize_rows` rounds it."""
    _check(gate_up, activation)
    check_rounding(rounding)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = allocate(rows, inner, rounding, gate_up)
    if out.codes.numel():
        tile, pdl = max(next_power_of_2(inner), group_of(rounding)), supports_pdl(gate_up.device)
        _act_mul_rounded_kernel[(rows,)](
            gate_up, out.codes, out.scales, static_scale(rounding, out.scales), gate_up.stride(0), inner,
            scales_stride(out.scales), bound(rounding),
            ACTIVATION=_NUMBERS[activation], SQRT_HALF=_SQRT_HALF, SQRT_8_OVER_PI=_SQRT_8_OVER_PI, TILE=tile,
            GROUP=group_of(rounding), STATIC=rounding.scale is not None, BOUNDED=is_bounded(rounding), PDL=pdl,
            num_warps=min(max(tile // 512, 1), 16), **pdl_options(pdl),
        )  # fmt: skip
    return out


def _check(gate_up: Tensor, activation: str) -> None:
    """Raises ValueError."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"expected [rows, 2 * inner], got {list(gate_up.shape)}")
    if gate_up.stride(1) != 1:
        raise ValueError(f"the elements of a row must be contiguous, got strides {gate_up.stride()}")
    if activation not in _NUMBERS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(_NUMBERS)}")
