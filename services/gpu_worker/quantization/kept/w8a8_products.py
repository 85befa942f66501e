"""Products of rows that were rounded to e4m3 or int8, on a GPU.

They are the default of `Fp8W8A8` and `Int8W8A8`, which the tuner replaces for numbers of rows that it measures. None
makes numbers of a weight, waits for the GPU, or lets a row depend on the others of its tile.
"""

import functools

import torch
from torch import Tensor

from blockyard.kernels.layers.rounding import E4M3, ROWS, InputRounding, RoundedRows
from blockyard.kernels.quantized.operands import Weight8Bit

if torch.cuda.is_available():
    # they import Triton, which comes only with CUDA builds of torch
    from blockyard.kernels.gpu_facts import compute_capability
    from blockyard.kernels.layers.linear_stream_k import Tiling
    from blockyard.kernels.programmatic_launch import supports_pdl
    from blockyard.kernels.quantized.linear_w8a8_stream_k import linear_w8a8_stream_k
    from blockyard.kernels.quantized.quantize_rows import quantize_rows

ALIGNMENT = 16  # bytes of a row that tensor cores read at once
TILES = {16: (64, 16, 128, 5, 4), 64: (64, 64, 128, 4, 4)}  # by most rows: see `linear_stream_k.Tiling`
MANY_ROWS = (128, 128, 128, 4, 8)
BLOCK = 128  # inputs, and outputs of a weight, that have one scale
# Inputs that tensor cores may sum without a pass through float32 registers: they keep 14 bits of a sum, and its error
# grows with the number of inputs.
FAST_INPUTS = 4096
SCALED_ROWS = (9, 0)  # compute capability from which `torch._scaled_mm` has scales of rows


def has_kernels(weight: Tensor) -> bool:
    """Whether kernels multiply by a weight [outputs, inputs] where it is."""
    return weight.device.type == "cuda" and weight.shape[1] % ALIGNMENT == 0


def multiply(x: Tensor, rounding: InputRounding, weight: Weight8Bit) -> Tensor:
    """x [rows, in] in 16 or 32 bits -> [rows, out]."""
    return multiply_rounded(quantize_rows(x, rounding), weight)


def multiply_rounded(rows: RoundedRows, weight: Weight8Bit) -> Tensor:
    """The product without bias: rows [rows, in] -> [rows, out] in their dtype before."""
    return by_library(rows, weight) if has_library(rows, weight) else by_tensor_cores(rows, weight)


def prepare_products(weight: Weight8Bit, dtype: torch.dtype) -> None:
    """Finds out whether `torch._scaled_mm` multiplies by this weight, before any step. dtype: of the model."""
    if weight.group is not None and weight.codes.dtype == E4M3 and dtype == torch.bfloat16:
        _multiplies_blocks(*weight.codes.shape, weight.block, weight.codes.device)


def has_library(rows: RoundedRows, weight: Weight8Bit) -> bool:
    """Whether `torch._scaled_mm` multiplies with scales of rows, or of groups and blocks."""
    codes = weight.codes
    if codes.dtype != E4M3 or rows.dtype != torch.bfloat16 or codes.shape[0] % ALIGNMENT:
        return False
    if compute_capability(codes.device) < SCALED_ROWS:
        return False
    if weight.group is None:
        return True
    known = weight.group == BLOCK and rows.scales.stride(1) % ROWS == 0
    return known and _multiplies_blocks(*codes.shape, weight.block, codes.device)


@functools.cache
def _multiplies_blocks(outs: int, inputs: int, block: int, device: torch.device) -> bool:
    """Whether torch and its cuBLAS multiply rows with scales of 128 inputs by a weight of this shape.

    Only scales of 128 outputs by 128 inputs: others would have to be transposed. They need CUDA 12.9 and compute
    capability 9.0, and a number of groups that is a multiple of 4, by which versions of torch differ.
    """
    groups = -(-inputs // BLOCK)
    if block != BLOCK or outs % ALIGNMENT or inputs % ALIGNMENT or groups % ROWS:
        return False
    codes = torch.zeros((outs + ROWS, inputs), dtype=torch.uint8, device=device).view(E4M3)
    scales = torch.ones((groups, ROWS), device=device).t(), torch.ones((-(-outs // BLOCK), groups), device=device)
    rows = RoundedRows(codes[outs:], scales[0], torch.bfloat16)
    try:
        by_library(rows, Weight8Bit(codes[:outs], scales[1], BLOCK, BLOCK))
    except RuntimeError:  # of the version of torch, CUDA or the GPU
        return False
    return True


def by_library(rows: RoundedRows, weight: Weight8Bit) -> Tensor:
    if weight.group is None:
        is_fast = weight.codes.shape[1] <= FAST_INPUTS
        return _scaled_mm(rows.codes, rows.scales[:, None], weight.codes, weight.scales[None], rows.dtype, is_fast)
    num, size = rows.codes.shape
    whole = -(-num // ROWS) * ROWS  # cuBLAS reads scales of so many rows: there is memory behind the last one
    codes = rows.codes.as_strided((whole, size), (size, 1))
    scales = rows.scales.as_strided((whole, rows.scales.shape[1]), (1, whole))
    return _scaled_mm(codes, scales, weight.codes, weight.scales.t(), rows.dtype)[:num]


def _scaled_mm(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype, is_fast: bool = False
) -> Tensor:
    out: Tensor = torch._scaled_mm(
        codes, weight.t(), scale_a=scales, scale_b=weight_scales, out_dtype=dtype, use_fast_accum=is_fast
    )
    return out


def by_tensor_cores(rows: RoundedRows, weight: Weight8Bit) -> Tensor:
    num = len(rows.codes)
    sizes = next((sizes for most, sizes in TILES.items() if num <= most), MANY_ROWS)
    return linear_w8a8_stream_k(rows, weight, None, Tiling(*sizes, supports_pdl(rows.codes.device)))
