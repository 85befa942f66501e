"""The write of latent attention's rows to the paged KV cache, with their norm and all rotations, in one pass; on a GPU.

A row of the cache is the latent, normalised, and the part of K that all heads share, rotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.kv_types import FP8_MAX, check_kv_dtype
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_TILE = 16  # heads of a program
_PDL_TOKENS = 64  # at most: more programs would wait in the place of programs of the kernel before


def write_latent_reference(
    query: Tensor,
    rows: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    weight: Tensor,
    eps: float,
    scales: Tensor | None = None,
) -> None:
    latent, plain = weight.shape[0], query.shape[2] - (rows.shape[1] - weight.shape[0])
    x = rows[:, :latent].to(torch.promote_types(rows.dtype, torch.float32))
    rows[:, :latent] = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(rows.dtype)
    if rotation is not None:
        apply_rope_reference(query[..., plain:], rotation)
        apply_rope_reference(rows[:, None, latent:], rotation)
    stored = rows
    if scales is not None:
        largest = FP8_MAX[layer.dtype]
        stored = (rows.float() / scales[0]).clamp(-largest, largest)
    for row, (slot, position) in enumerate(zip(metadata.slots.tolist(), metadata.positions.tolist(), strict=True)):
        if slot >= 0:
            block = int(metadata.tables[slot, position // layer.shape[3]])
            layer[block, 0, 0, position % layer.shape[3]] = stored[row].to(layer.dtype)


@triton.jit
def _rotate(x, angle, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Elements 2n and 2n + 1 of x [ROWS, DIM] are a pair, and those of angle [DIM] are its cosine and sine."""
    cos, sin = tl.split(tl.reshape(angle, [1, DIM // 2, 2]))
    even, odd = tl.split(tl.reshape(x, [ROWS, DIM // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, DIM])


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _write_latent_kernel(
    query_ptr, rows_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, rotation_ptr, weight_ptr, scales_ptr,
    query_stride, row_stride, table_stride, eps,
    FP8_MAX: tl.constexpr, HEADS: tl.constexpr, QUERY_DIM: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTATE: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, 0): the row of token i; program (i, j): TILE heads of its query
    dims = tl.arange(0, DIM)
    in_latent = dims < LATENT
    weight = tl.load(weight_ptr + dims, mask=in_latent, other=0.0).to(tl.float32)  # no kernel writes it
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    turned = tl.arange(0, ROTATED_DIM)
    in_turned = turned < ROTATED
    if ROTATE:
        angle = tl.load(rotation_ptr + token * ROTATED + turned, mask=in_turned, other=0.0)
    if tl.program_id(1) > 0:
        if ROTATE:
            heads = (tl.program_id(1) - 1) * TILE + tl.arange(0, TILE)
            inside = (heads < HEADS)[:, None] & in_turned[None, :]
            places = query_ptr + token * query_stride + heads[:, None] * QUERY_DIM + QUERY_DIM - ROTATED
            x = tl.load(places + turned[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(places + turned[None, :], _rotate(x, angle, TILE, ROTATED_DIM), mask=inside)
        return
    # all loads come before the first store, behind which the compiler leaves those that follow it
    row_ptr = rows_ptr + token * row_stride
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    latent = tl.load(row_ptr + dims, mask=in_latent, other=0.0).to(tl.float32)
    shared = tl.load(row_ptr + LATENT + turned, mask=in_turned, other=0.0).to(tl.float32)
    block_ptr = tables_ptr + slot * table_stride + position // BLOCK_SIZE
    block = tl.load(block_ptr, mask=slot >= 0, other=0).to(tl.int64)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * weight
    latent = latent.to(rows_ptr.dtype.element_ty).to(tl.float32)  # as prefills read it that decompress this row
    tl.store(row_ptr + dims, latent, mask=in_latent)
    if ROTATE:
        shared = tl.reshape(_rotate(tl.reshape(shared, [1, ROTATED_DIM]), angle, 1, ROTATED_DIM), [ROTATED_DIM])
        shared = shared.to(rows_ptr.dtype.element_ty).to(tl.float32)
        tl.store(row_ptr + LATENT + turned, shared, mask=in_turned)
    if slot >= 0:
        stored_ptr = layer_ptr + (block * BLOCK_SIZE + position % BLOCK_SIZE) * (LATENT + ROTATED)
        if FP8_MAX > 0:
            scale = tl.load(scales_ptr)
            latent = tl.minimum(tl.maximum(latent / scale, -FP8_MAX), FP8_MAX)
            shared = tl.minimum(tl.maximum(shared / scale, -FP8_MAX), FP8_MAX)
        tl.store(stored_ptr + dims, latent, mask=in_latent)
        tl.store(stored_ptr + LATENT + turned, shared, mask=in_turned)


def write_latent(
    query: Tensor,
    rows: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    weight: Tensor,
    eps: float,
    scales: Tensor | None = None,
) -> None:
    """Normalises and rotates rows in place, writes them to the cache, and rotates the last part of each query head.

    query [tokens, heads, plain + rotated] and rows [tokens, latent + rotated], of which the tokens may be strided;
    layer [num_blocks, 1, 1, block_size, latent + rotated]; weight [latent] of the latent's RMSNorm; rotation [tokens,
    1, rotated/2] complex64, None: nothing is rotated. Padding rows are not written to the cache. scales: of an 8-bit
    cache, see `check_kv_dtype`, of which the first is that of the whole row. Blocks and positions are not checked on
    device. Raises ValueError for other shapes and dtypes.
    """
    tokens, heads, query_dim = query.shape
    latent, row_dim = weight.shape[0], rows.shape[1]
    rotated = row_dim - latent
    metadata.check(tokens)
    check_kv_dtype(query, layer, scales)
    if rows.shape != (tokens, row_dim) or rows.dtype != query.dtype or not 0 < rotated < query_dim or rotated % 2:
        raise ValueError(f"rows {list(rows.shape)} {rows.dtype}, query {list(query.shape)} {query.dtype}")
    if layer.ndim != 5 or layer.shape[1:3] != (1, 1) or layer.shape[4] != row_dim or not layer.is_contiguous():
        raise ValueError(f"rows {list(rows.shape)} do not fit a layer {list(layer.shape)}, or that is not contiguous")
    if query.stride()[1:] != (query_dim, 1) or rows.stride(1) != 1 or weight.stride(0) != 1:
        raise ValueError(f"a token must be contiguous, got strides {query.stride()}, {rows.stride()}")
    if rotation is not None and (rotation.shape != (tokens, 1, rotated // 2) or rotation.dtype != torch.complex64):
        raise ValueError(f"rotation {list(rotation.shape)} {rotation.dtype} does not fit {tokens} rows of {rotated}")
    if not tokens:
        return
    pdl = tokens <= _PDL_TOKENS and supports_pdl(query.device)
    angles = query if rotation is None else torch.view_as_real(rotation.contiguous())
    _write_latent_kernel[(tokens, 1 + (ceil_div(heads, _TILE) if rotation is not None else 0))](
        query, rows, layer, metadata.slots, metadata.positions, metadata.tables, angles, weight,
        query if scales is None else scales, query.stride(0), rows.stride(0), metadata.tables.stride(0), eps,
        FP8_MAX=FP8_MAX.get(layer.dtype, 0.0), HEADS=heads, QUERY_DIM=query_dim, LATENT=latent,
        DIM=next_power_of_2(latent), ROTATED=rotated, ROTATED_DIM=next_power_of_2(rotated), BLOCK_SIZE=layer.shape[3],
        ROTATE=rotation is not None, TILE=_TILE, PDL=pdl, num_warps=2, **pdl_options(pdl),
    )  # fmt: skip
