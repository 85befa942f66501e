"""The logits of tokens for which adapters have rows of the head of their own, on a GPU."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.lora.adapter_tokens import COLUMNS, AdapterTokens
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_TOKENS = 16  # of a program
_INPUTS = 256


@triton.jit
def replace_logits_kernel(
    x_ptr, places_ptr, arena_ptr, columns_ptr, ids_ptr, out_ptr, x_stride, out_stride, inputs, most,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): tokens of tile j of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place < 0:
        return
    num = tl.load(columns_ptr + place * COLUMNS).to(tl.int32)
    first = tl.program_id(1) * TOKENS
    if first >= num:
        return
    tokens = first + tl.arange(0, TOKENS)
    values_ptr = arena_ptr + tl.load(columns_ptr + place * COLUMNS + 1)
    total = tl.zeros([TOKENS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        cols = begin + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < inputs, other=0.0).to(tl.float32)
        inside = (tokens[:, None] < num) & (cols[None, :] < inputs)
        values = tl.load(values_ptr + tokens[:, None].to(tl.int64) * inputs + cols[None, :], mask=inside, other=0.0)
        total += tl.sum(values.to(tl.float32) * x[None, :], axis=1)
    ids = tl.load(ids_ptr + place * most + tokens, mask=tokens < num, other=0)
    tl.store(out_ptr + row * out_stride + ids, total.to(out_ptr.dtype.element_ty), mask=tokens < num)


def replace_logits(x: Tensor, places: Tensor, table: AdapterTokens, out: Tensor) -> None:
    """Writes the logits of x [rows, width] with the rows that adapters have, into the columns of their tokens in out
    [rows, any].

    places [rows] int32, below 0: a row has no adapter. Rows of x and out may be strided. Tokens must be columns of
    `out`, and places fit the table: not checked on the device. Raises ValueError for other shapes.
    """
    rows, inputs = x.shape
    table.check(places, rows)
    if len(out) != rows or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"expected rows of x and out alike, got {list(x.shape)} and {list(out.shape)}")
    most = table.token_ids.shape[1]
    if rows and most:
        pdl = supports_pdl(x.device)
        replace_logits_kernel[rows, ceil_div(most, _TOKENS)](
            x, places, table.arena, table.columns, table.token_ids, out, x.stride(0), out.stride(0), inputs, most,
            COLUMNS=COLUMNS, TOKENS=_TOKENS, INPUTS=_INPUTS, PDL=pdl, **pdl_options(pdl),
        )  # fmt: skip
