"""Random quantized weights of experts, in every form that kernels read."""

import math

import torch
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.quantized.packed_weights import E8M0, Codes, ExpertRounding, PackedWeights, RoundedTo

E4M3 = torch.float8_e4m3fn
NF4 = tuple(math.erf(i / 8 - 0.9) for i in range(16))  # any table
W4A16, TABLE, W8A16, FP8, INT8 = "w4a16", "table4a16", "w8a16", "fp8", "int8"
# kind, group, dtype of scales, dtype of zeros, scales of rows too, rounding
FORMS = {
    "int4 g32": (Codes.INT4, 32, torch.float16, None, False, RoundedTo.NONE),
    "int4 g64 uint8 zeros": (Codes.INT4, 64, torch.bfloat16, torch.uint8, False, RoundedTo.NONE),
    "int4 g128": (Codes.INT4, 128, torch.float16, None, False, RoundedTo.NONE),
    "int4 g32 float zeros": (Codes.INT4, 32, torch.float32, torch.float16, False, RoundedTo.NONE),
    "int4 g48": (Codes.INT4, 48, torch.float16, torch.uint8, False, RoundedTo.NONE),
    "int4 rows": (Codes.INT4, 0, torch.float16, None, True, RoundedTo.NONE),
    "int4 rows uint8 zeros": (Codes.INT4, 0, torch.float16, torch.uint8, True, RoundedTo.NONE),
    "nf4 g64": (Codes.TABLE4, 64, torch.float32, None, False, RoundedTo.NONE),
    "mxfp4": (Codes.E2M1, 32, E8M0, None, False, RoundedTo.NONE),
    "nvfp4": (Codes.E2M1, 16, E4M3, None, True, RoundedTo.NONE),
    "int8 rows": (Codes.INT8, 0, torch.float32, None, True, RoundedTo.NONE),
    "uint8 g16 zeros": (Codes.UINT8, 16, torch.float16, torch.float16, False, RoundedTo.NONE),
    "mxfp8": (Codes.E4M3, 32, E8M0, None, False, RoundedTo.NONE),
    "fp8 rows": (Codes.E4M3, 0, torch.float32, None, True, RoundedTo.E4M3),
    "fp8 g128": (Codes.E4M3, 128, torch.float32, None, False, RoundedTo.E4M3),
    "fp8 g32": (Codes.E4M3, 32, torch.float32, None, False, RoundedTo.E4M3),
    "int8 inputs": (Codes.INT8, 0, torch.float32, None, True, RoundedTo.INT8),
    "int8 inputs with zeros": (Codes.INT8, 0, torch.float32, None, True, RoundedTo.ASYMMETRIC_INT8),
}
# whose groups fit blocks
WEIGHT_ONLY = [name for name in FORMS if name != "int4 g48" and FORMS[name][1] in (0, 16, 32, 64, 128)]


def draw(name: str, experts: int, outs: int, size: int, device: str, zero: int | None = None) -> PackedWeights:
    """Weights of about 0.2, of experts that differ. zero: each zero is this number."""
    kind, group, scales, zeros, has_rows, _ = FORMS[name]
    columns = ceil_div(size, 2) if kind <= Codes.TABLE4 else size
    if kind is Codes.E4M3:
        codes = (torch.randn(experts, outs, columns, device=device) * 20).to(E4M3)
    else:
        dtype = torch.int8 if kind is Codes.INT8 else torch.uint8
        low, high = (-128, 128) if kind is Codes.INT8 else (0, 256)
        codes = torch.randint(low, high, (experts, outs, columns), device=device).to(dtype)
    if kind <= Codes.TABLE4 and size % 2:
        codes[..., -1] &= 15
    spread = {Codes.INT4: 5, Codes.E2M1: 3, Codes.TABLE4: 0.7}.get(kind, 20 if kind is Codes.E4M3 else 75)
    whole = (experts, outs, ceil_div(size, group)) if group else (experts, outs)
    made = 0.2 / spread * (0.5 + torch.rand(whole, device=device))
    own: Tensor | None = None
    least = 118 if kind is Codes.E4M3 else 122
    if group:
        own = (
            torch.randint(least, least + 4, whole, device=device).byte()
            if scales == E8M0
            else ((made * 16 if scales == E4M3 else made).to(scales))
        )
    drawn: Tensor | None = None
    if zeros is not None:
        middle = 8 if kind is Codes.INT4 else 128
        drawn = (
            torch.randint(middle - 4, middle + 5, whole, device=device)
            if zero is None
            else torch.full(whole, zero, device=device)
        )
        drawn = drawn.to(zeros)
        if zeros.is_floating_point:  # not whole
            drawn += torch.rand(whole, device=device).to(zeros)
    rows = (0.5 + torch.rand(experts, outs, device=device)) * (0.1 if group else 0.2 / spread) if has_rows else None
    if rows is not None and scales == torch.float16:
        rows = rows.half()
    return PackedWeights(
        codes=codes,
        kind=kind,
        inputs=size,
        group=group,
        scales=own,
        zeros=drawn,
        row_scales=rows,
        table=torch.tensor(NF4, device=device) if kind is Codes.TABLE4 else None,
        is_e8m0=scales == E8M0,
    )


def rounding_of(name: str) -> ExpertRounding:
    _, group, *_, rounding = FORMS[name]
    return ExpertRounding(kind=rounding, group=group if rounding is RoundedTo.E4M3 else 0)
