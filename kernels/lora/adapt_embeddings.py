"""What adapters change of the embeddings of tokens, on a GPU: rows of their own, and a product of low rank."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.lora.adapter_tokens import COLUMNS, AdapterTokens
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.tensor_checks import check_tensor

_TOKENS = 256  # ids of a place that are compared at once
_RANKS = 16
_WIDTH = 128  # columns of a program


@triton.jit
def adapt_embeddings_kernel(
    found_ptr, token_ids_ptr, places_ptr, arena_ptr, columns_ptr, ids_ptr, stride, width, most,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): columns of tile j of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place < 0:
        return
    columns_ptr += place * COLUMNS
    num, rank = tl.load(columns_ptr).to(tl.int32), tl.load(columns_ptr + 2).to(tl.int32)
    if (num == 0) & (rank == 0):
        return
    token = tl.load(token_ids_ptr + row)
    at = tl.full([], -1, tl.int32)
    for begin in range(0, num, TOKENS):
        index = begin + tl.arange(0, TOKENS)
        ids = tl.load(ids_ptr + place * most + index, mask=index < num, other=-1)
        at = tl.maximum(at, tl.max(tl.where(ids == token, index, -1), 0))
    cols = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = cols < width
    target = found_ptr + row * stride + cols
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    if at >= 0:
        own_ptr = arena_ptr + tl.load(columns_ptr + 1) + at.to(tl.int64) * width
        total = tl.load(own_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    a_ptr = arena_ptr + tl.load(columns_ptr + 3) + token * rank
    b_ptr = arena_ptr + tl.load(columns_ptr + 4)
    for begin in range(0, rank, RANKS):
        ranks = begin + tl.arange(0, RANKS)
        a = tl.load(a_ptr + ranks, mask=ranks < rank, other=0.0).to(tl.float32)
        there = inside[:, None] & (ranks < rank)[None, :]
        b = tl.load(b_ptr + cols[:, None].to(tl.int64) * rank + ranks[None, :], mask=there, other=0.0)
        total += tl.sum(b.to(tl.float32) * a[None, :], axis=1)
    tl.store(target, total.to(found_ptr.dtype.element_ty), mask=inside)


def adapt_embeddings(found: Tensor, token_ids: Tensor, places: Tensor, table: AdapterTokens) -> None:
    """Changes found [rows, width], the embeddings of token_ids [rows] int64, in place: where a row's adapter has the
    token, its own row replaces the embedding, and then A[token] @ B.T is added.

    places [rows] int32, below 0: a row has no adapter. Tokens must be rows of A, and places fit the table: not checked
    on the device. Raises ValueError for other shapes.
    """
    rows, width = found.shape
    table.check(places, rows)
    check_tensor("token_ids", token_ids, (rows,), torch.int64)
    if found.stride(1) != 1:
        raise ValueError(f"the elements of a row must be contiguous, got strides {found.stride()}")
    if rows and width:
        pdl = supports_pdl(found.device)
        adapt_embeddings_kernel[rows, ceil_div(width, _WIDTH)](
            found, token_ids, places, table.arena, table.columns, table.token_ids, found.stride(0), width,
            table.token_ids.shape[1],
            COLUMNS=COLUMNS, TOKENS=_TOKENS, RANKS=_RANKS, WIDTH=_WIDTH, PDL=pdl, **pdl_options(pdl),
        )  # fmt: skip
