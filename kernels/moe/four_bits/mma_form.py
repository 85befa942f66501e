"""What kernels of products with weights of 4 bits on tensor cores are compiled for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.quantized.packed_weights import Codes, PackedWeights
from blockyard.kernels.quantized.unpack_assembly import unpack_assembly

CHUNK = 32  # inputs that a thread reads at once
LAST = 128  # groups of a multiple of so many inputs: their scales multiply sums


@dataclass(frozen=True, slots=True)
class MmaTiling:
    """Powers of two."""

    out_tile: int  # rows of the weight that a program reads, at least 16: gate and up of half as many outputs
    warps: int
    ahead: int  # steps whose codes are loaded before they are used; at least 1. In tiles of 8 pairs inputs are, too
    registers: int = 0  # of a thread at most: fewer of them let more programs run at a time; 0: as compiled
    copies: int = 0  # 1: codes wait in shared memory, and take no registers until they are used
    row_warps: int = 1  # so many times more warps share the rows: inputs are fetched once for more rows


@dataclass(frozen=True, slots=True)
class MmaForm:
    """What kernels are compiled for, of weights that do not change. Made by `mma_form`."""

    assembly: str
    is_exact: bool  # the dtype of x has all scales
    # Numbers of E2M1 as the smallest of bfloat16, 2 ** -126 times; scales 2 ** 64 times, sums 2 ** 62 times. Those from
    # 2 ** -63 to 2 ** 63 are right; less is 0.
    is_small: bool


def mma_form(weights: PackedWeights, dtype: torch.dtype) -> MmaForm | None:
    """The form of these weights with rows of this dtype, None if the kernels do not multiply them. Reads a table back:
    not in steps."""
    zeros, scales, group = weights.zeros, weights.scales, weights.group
    if weights.kind > Codes.TABLE4 or weights.inputs % CHUNK or (zeros is not None and zeros.is_floating_point()):
        return None
    if group % LAST and group not in (16, 32, 64):
        return None
    is_exact = weights.is_e8m0 or (scales is not None and scales.dtype in (dtype, torch.float8_e4m3fn))
    if dtype == torch.float16 and group % LAST and (weights.is_e8m0 or not is_exact):
        return None  # their range
    table = None if weights.table is None else tuple(weights.table.tolist())
    is_small = weights.kind is Codes.E2M1 and dtype == torch.bfloat16 and group % LAST != 0 and zeros is None
    assembly = unpack_assembly(weights.kind, dtype, zeros is None, table, of_words=True, small=is_small)
    return MmaForm(assembly, is_exact, is_small) if assembly else None


def pointers(weights: PackedWeights) -> list[Tensor]:
    """Codes as words, scales, zeros and scales of rows; codes in the place of what there is not."""
    codes = weights.codes.view(torch.int32)
    return [codes, *(codes if one is None else one for one in (weights.scales, weights.zeros, weights.row_scales))]


def constants(x: Tensor, weights: PackedWeights, form: MmaForm, tiling: MmaTiling) -> dict[str, Any]:
    pdl = supports_pdl(x.device)
    return {
        "SIZE": weights.inputs,
        "GROUP": weights.group,
        "SCALES": weights.scales is not None,
        "E8M0": weights.is_e8m0,
        "EXACT": form.is_exact,
        "SMALL": form.is_small,
        "ZEROS": weights.zeros is not None,
        "ROW_SCALES": weights.row_scales is not None,
        "ASM": form.assembly,
        "R": tiling.out_tile,
        "W": tiling.warps,
        "AHEAD": tiling.ahead,
        "PDL": pdl,
        "COPIES": tiling.copies > 0,
        "V": tiling.row_warps,
        "num_warps": tiling.warps * tiling.row_warps,
        "maxnreg": tiling.registers or None,
        **pdl_options(pdl),
    }


def check_operands(
    x: Tensor, weights: PackedWeights, num_pairs: int, bias: Tensor | None, scale: Tensor | None
) -> None:
    """Raises ValueError."""
    weights.check()
    if x.shape[1] != weights.inputs or not x.is_contiguous():
        raise ValueError(f"rows {list(x.shape)} must be contiguous, of {weights.inputs} inputs")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weights.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"a bias {list(bias.shape)} {bias.dtype} does not fit {list(weights.shape)} {x.dtype}")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != num_pairs or not scale.is_contiguous()):
        raise ValueError(f"scale must be {num_pairs} float32, got {list(scale.shape)} {scale.dtype}")
