"""Products of rows that were rounded to e4m3 or int8, on a GPU.

They are the default of `Fp8W8A8` and `Int8W8A8`, which the tuner replaces for numbers of rows that it measures. None
makes numbers of a weight, waits for the GPU, or lets a row depend on the others of its tile.
"""

import torch
from torch import Tensor

from blockyard.kernels.layers.rounding import E4M3, InputRounding, RoundedRows
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
SCALED_ROWS = (9, 0)  # compute capability from which `torch._scaled_mm` has scales of rows


def multiply(x: Tensor, rounding: InputRounding, weight: Weight8Bit) -> Tensor:
    """x [rows, in] in 16 or 32 bits -> [rows, out]."""
    return multiply_rounded(quantize_rows(x, rounding), weight)


def multiply_rounded(rows: RoundedRows, weight: Weight8Bit) -> Tensor:
    """The product without bias: rows [rows, in] -> [rows, out] in their dtype before."""
    return by_library(rows, weight) if has_library(rows, weight) else by_tensor_cores(rows, weight)


def has_library(rows: RoundedRows, weight: Weight8Bit) -> bool:
    """Whether `torch._scaled_mm` multiplies with scales of rows."""
    return (
        weight.group is None
        and weight.codes.dtype == E4M3
        and rows.dtype == torch.bfloat16
        and weight.codes.shape[0] % ALIGNMENT == 0
        and compute_capability(weight.codes.device) >= SCALED_ROWS
    )


def by_library(rows: RoundedRows, weight: Weight8Bit) -> Tensor:
    out: Tensor = torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales[:, None],
        scale_b=weight.scales[None],
        out_dtype=rows.dtype,
    )
    return out


def by_tensor_cores(rows: RoundedRows, weight: Weight8Bit) -> Tensor:
    num = len(rows.codes)
    sizes = next((sizes for most, sizes in TILES.items() if num <= most), MANY_ROWS)
    return linear_w8a8_stream_k(rows, weight, None, Tiling(*sizes, supports_pdl(rows.codes.device)))
