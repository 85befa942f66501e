"""The products of adapters of latent attention's up-projection where it is absorbed, so that K and V are never made.

An adapter adds B @ A to the matrices of all heads. Of one head, K's rows of B and then A move a query into the latent,
and A and then V's rows of B make its output of an attended latent. A program computes for one row and one head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.lora.adapter_table import OFFSETS, AdapterTable
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.tensor_checks import check_tensor

_RANKS = 16  # of a tile


def add_to_heads_reference(
    x: Tensor, places: Tensor, table: AdapterTable, plain_dim: int, out: Tensor, *, values: bool
) -> None:
    heads, size, latent = x.shape[1], int(table.sizes[0]), x.shape[2] if values else out.shape[2]
    for row, place in enumerate(places.tolist()):
        rank = int(table.ranks[place, 0]) if place >= 0 else 0
        a_at, b_at, bias_at = table.offsets[place, 0].tolist()
        b = table.arena[b_at : b_at + size * rank].view(heads, size // heads, rank).float()
        a = table.arena[a_at : a_at + rank * latent].view(rank, latent).float()
        of_head = x[row, :, None].float()  # [heads, 1, in]
        if values:
            added = of_head @ a.T @ b[:, plain_dim:].mT
            if place >= 0 and table.offsets[place, 0, 2] >= 0:
                bias = table.arena[bias_at : bias_at + size].view(heads, 1, -1)
                added += bias[..., plain_dim:].float()
        else:
            added = of_head @ b[:, :plain_dim] @ a
        out[row] = (out[row].float() + added[:, 0]).to(out.dtype)


@triton.jit
def add_to_heads_kernel(
    x_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, out_ptr, x_row, x_head, out_row, out_head, width, latent,
    plain_dim, inputs, outputs, place_stride,
    VALUES: tl.constexpr, OFFSETS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program (i, h): head h of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place < 0:
        return
    entry = place * place_stride
    rank = tl.load(ranks_ptr + entry)
    bias_at = tl.load(offsets_ptr + entry * OFFSETS + 2)
    if (rank == 0) & (bias_at < 0):
        return
    a_ptr = arena_ptr + tl.load(offsets_ptr + entry * OFFSETS)
    b_ptr = arena_ptr + tl.load(offsets_ptr + entry * OFFSETS + 1) + head * width * rank
    rows, cols = tl.arange(0, INPUTS), tl.arange(0, OUTPUTS)
    x = tl.load(x_ptr + row * x_row + head * x_head + rows, mask=rows < inputs, other=0.0).to(tl.float32)
    total = tl.zeros([OUTPUTS], tl.float32)
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        if VALUES:
            shrink = a_ptr + ranks[:, None] * latent + rows[None, :]
            expand = b_ptr + (plain_dim + cols)[None, :] * rank + ranks[:, None]
        else:
            shrink = b_ptr + rows[None, :] * rank + ranks[:, None]
            expand = a_ptr + ranks[:, None] * latent + cols[None, :]
        exists = (ranks < rank)[:, None]
        shrunk = tl.load(shrink, mask=exists & (rows < inputs)[None, :], other=0.0).to(tl.float32)
        h = tl.sum(shrunk * x[None, :], axis=1)
        expanded = tl.load(expand, mask=exists & (cols < outputs)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(expanded * h[:, None], axis=0)
    if VALUES and bias_at >= 0:
        bias_ptr = arena_ptr + bias_at + head * width + plain_dim
        total += tl.load(bias_ptr + cols, mask=cols < outputs, other=0.0).to(tl.float32)
    target = out_ptr + row * out_row + head * out_head + cols
    total += tl.load(target, mask=cols < outputs, other=0.0).to(tl.float32)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=cols < outputs)


def add_to_heads(x: Tensor, places: Tensor, table: AdapterTable, plain_dim: int, out: Tensor, *, values: bool) -> None:
    """Adds the products of adapters to out [rows, heads, outputs], in place.

    x [rows, heads, plain_dim] are queries and the outputs latents, or, with `values`, x are attended latents and the
    outputs values. table: of one part, heads * (plain_dim + values) outputs of the latent. places [rows] int32, below
    0: a row has no adapter; not checked on the device. A bias of K changes no softmax and is left out. Raises
    ValueError for other shapes.
    """
    check_tensor("places", places, (len(x),), torch.int32)
    rows, heads, inputs = x.shape
    latent, size = (inputs, out.shape[2]) if values else (out.shape[2], inputs)
    if table.num_parts != 1 or table.largest % heads or out.shape[:2] != x.shape[:2] or size <= 0:
        raise ValueError(f"expected rows of heads alike, got {list(x.shape)} and {list(out.shape)}")
    width = table.largest // heads
    if (plain_dim + size != width if values else size != plain_dim) or x.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"{size} numbers of a head do not fit {width}, of which {plain_dim} are of K")
    if not rows:
        return
    pdl = supports_pdl(x.device)
    add_to_heads_kernel[rows, heads](
        x, places, table.arena, table.offsets, table.ranks, out, x.stride(0), x.stride(1), out.stride(0),
        out.stride(1), width, latent, plain_dim, inputs, out.shape[2], table.place_stride,
        VALUES=values, OFFSETS=OFFSETS, RANKS=_RANKS, INPUTS=next_power_of_2(inputs),
        OUTPUTS=next_power_of_2(out.shape[2]), PDL=pdl, **pdl_options(pdl),
    )  # fmt: skip
