"""Writes the numbers that quantized weights stand for, for products with so many rows that a library is quicker; on a
GPU."""

import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights, dequantized_blocks
from blockyard.kernels.quantized.packed_weights import Codes
from blockyard.kernels.quantized.unpack_assembly import unpack_assembly
from blockyard.kernels.quantized.unpack_tiles import halves, numbers, scale_numbers

OUT_TILE = 64


def unpack_blocks_reference(weights: BlockWeights) -> Tensor:
    """In float64."""
    return dequantized_blocks(weights)


@triton.jit
def _of_groups(ptr, start, outs, out, GROUP: tl.constexpr, COUNT: tl.constexpr, E8M0: tl.constexpr):
    """Scales or zeros of the COUNT groups of 64 inputs from `start` on as float32 [OUT_TILE, COUNT, 1]."""
    first = 0 if GROUP == 0 else start // GROUP
    found = tl.load(ptr + (first + tl.arange(0, COUNT))[None, :] * outs + out[:, None])
    return scale_numbers(found, E8M0)[:, :, None]


@triton.jit
def _scaled(number, scales_ptr, zeros_ptr, row_scale, start, outs, out, GROUP: tl.constexpr, SCALES: tl.constexpr,
            E8M0: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Numbers [OUT_TILE, 64] of inputs from `start` on, with zeros and scales, each of which is loaded once."""
    COUNT: tl.constexpr = 64 // GROUP if GROUP % 64 > 0 else 1
    grouped = tl.reshape(number.to(tl.float32), [number.shape[0], COUNT, 64 // COUNT])
    if ZEROS:
        grouped -= _of_groups(zeros_ptr, start, outs, out, GROUP, COUNT, False)
    if SCALES:
        grouped *= _of_groups(scales_ptr, start, outs, out, GROUP, COUNT, E8M0)
    return tl.reshape(grouped, [number.shape[0], 64]) * row_scale[:, None]


@triton.jit
def _unpack_blocks_kernel(
    codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, table_ptr, out_ptr, begin, end, outs, size,
    OUT_TILE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, E8M0: tl.constexpr,
    ZEROS: tl.constexpr, ROW_SCALES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # program (i, j): outputs begin + i * OUT_TILE ... of block j
    step = tl.program_id(1)
    place = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    out = tl.minimum(begin + place, end - 1)
    known = (begin + place < end)[:, None]
    column = tl.arange(0, 64)[None, :]
    WIDTH: tl.constexpr = 64 if CODES <= 3 else 128
    rows = codes_ptr + (step.to(tl.int64) * outs + out)[:, None] * WIDTH + column
    if CODES <= 3:
        codes = tl.load(rows)
        WORK: tl.constexpr = tl.float32 if ASM == "" else out_ptr.dtype.element_ty  # in which all numbers are exact
        low, high = halves(codes, table_ptr, CODES, not ZEROS, WORK, ASM)
    else:
        low = numbers(tl.load(rows), table_ptr, CODES, not ZEROS, tl.float32)
        high = numbers(tl.load(rows + 64), table_ptr, CODES, not ZEROS, tl.float32)
    row_scale = tl.full([OUT_TILE], 1.0, tl.float32)
    if ROW_SCALES:
        row_scale = tl.load(row_scales_ptr + out).to(tl.float32)
    where = out_ptr + place.to(tl.int64)[:, None] * size
    low = _scaled(low, scales_ptr, zeros_ptr, row_scale, step * 128, outs, out, GROUP, SCALES, E8M0, ZEROS)
    column += step * 128
    tl.store(where + column, low.to(out_ptr.dtype.element_ty), mask=known & (column < size))
    high = _scaled(high, scales_ptr, zeros_ptr, row_scale, step * 128 + 64, outs, out, GROUP, SCALES, E8M0, ZEROS)
    column += 64
    tl.store(where + column, high.to(out_ptr.dtype.element_ty), mask=known & (column < size))


def unpack_blocks(weights: BlockWeights, out: Tensor, begin: int = 0, table: Tensor | None = None) -> None:
    """Writes the outputs from `begin` on to out [some outputs, inputs], contiguous.

    table: that of the weights on the device, if they have one.
    """
    size, nothing = weights.inputs, weights.codes
    if out.shape[1] != size or begin + len(out) > weights.outputs or not out.is_contiguous():
        raise ValueError(f"{list(out.shape)} does not hold outputs of [{weights.outputs}, {size}] from {begin} on")
    is_exact = out.is_cuda and weights.kind in (Codes.INT4, Codes.E2M1)
    assembly = unpack_assembly(weights.kind, out.dtype, weights.zeros is None) if is_exact else ""
    _unpack_blocks_kernel[(ceil_div(len(out), OUT_TILE), ceil_div(size, BLOCK))](
        weights.codes, nothing if weights.scales is None else weights.scales,
        nothing if weights.zeros is None else weights.zeros,
        nothing if weights.row_scales is None else weights.row_scales, nothing if table is None else table, out, begin,
        begin + len(out), weights.outputs, size, OUT_TILE=OUT_TILE, CODES=int(weights.kind),
        GROUP=weights.group, SCALES=weights.scales is not None, E8M0=weights.is_e8m0, ZEROS=weights.zeros is not None,
        ROW_SCALES=weights.row_scales is not None, ASM=assembly,
    )  # fmt: skip
