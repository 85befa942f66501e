"""Norm of heads, rotary embedding, and the write of K and V to the paged cache, in one pass; on a GPU."""

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

_TILE = 8  # heads a program
_FEW = 16 * 132  # with fewer heads in all rows, a program has one head


def rope_write_kv_reference(
    qkv: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
) -> None:
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    qk = qkv[:, : heads + kv_heads]
    if weight is not None:
        normed = qkv[:, : len(weight)]
        x = normed.float()
        normed.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float())
    if rotation is not None:
        apply_rope_reference(qk, rotation)
    for row, (slot, position) in enumerate(zip(metadata.slots.tolist(), metadata.positions.tolist(), strict=True)):
        if slot >= 0:
            block = int(metadata.tables[slot, position // block_size])
            kv = qkv[row, heads:].view(2, kv_heads, -1)
            if scales is not None:
                largest = FP8_MAX[layer.dtype]
                kv = (kv / scales.view(2, 1, 1)).clamp(-largest, largest)
            layer[block, :, :, position % block_size] = kv.to(layer.dtype)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _rope_write_kv_kernel(
    qkv_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, rotation_ptr, weight_ptr, scales_ptr, row_stride,
    table_stride, eps,
    FP8_MAX: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROTATE: tl.constexpr, NORMED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): TILE heads of row i, in the order q, k, v, of which the first NORMED are normalised; elements 2n
    # and 2n + 1 are a pair
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    inside = (heads < HEADS + 2 * KV_HEADS)[:, None] & in_head[None, :]
    columns = heads[:, None] * HEAD_DIM + dims[None, :]
    x = tl.load(qkv_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    turns = (heads < HEADS + KV_HEADS)[:, None]
    if NORMED > 0:
        normed = (heads < NORMED)[:, None]
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
        weight = tl.load(weight_ptr + columns, mask=inside & normed, other=0.0).to(tl.float32)
        x = tl.where(normed, x * scale[:, None] * weight, x)
    if ROTATE:
        angle = tl.load(rotation_ptr + row * HEAD_DIM + dims, mask=in_head, other=0.0)
        cos, sin = tl.split(tl.reshape(angle, [1, DIM // 2, 2]))
        even, odd = tl.split(tl.reshape(x, [TILE, DIM // 2, 2]))
        turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        x = tl.where(turns, tl.reshape(turned, [TILE, DIM]), x)
    tl.store(qkv_ptr + row * row_stride + columns, x, mask=inside & (heads < HEADS)[:, None])
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        position = tl.load(positions_ptr + row)
        block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
        lines = (block * (2 * KV_HEADS) + heads - HEADS) * BLOCK_SIZE + position % BLOCK_SIZE
        stored = inside & (heads >= HEADS)[:, None]
        if FP8_MAX > 0:
            k_scale, v_scale = tl.load(scales_ptr), tl.load(scales_ptr + 1)
            x = x / tl.where(heads < HEADS + KV_HEADS, k_scale, v_scale)[:, None]
            x = tl.minimum(tl.maximum(x, -FP8_MAX), FP8_MAX)
        tl.store(layer_ptr + lines[:, None] * HEAD_DIM + dims[None, :], x, mask=stored)


def rope_write_kv(
    qkv: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Normalises q and k by `weight`, rotates them by `rotation`, keeps q in qkv and writes K and V to the cache.

    qkv [rows, heads + 2 * kv_heads, head_dim]; layer [num_blocks, 2, kv_heads, block_size, head_dim]; weight [heads +
    kv_heads, head_dim] and rotation [rows, 1, head_dim/2] complex64 may be None. A weight of as many heads as qkv has
    normalises v, too. k in qkv is undefined afterwards.
    Padding rows write no KV. scales: of an 8-bit cache, see `check_kv_dtype`; K and V are divided by them.
    batch_invariant: a row is rounded alike whatever the number of rows. Blocks and positions are not checked on device.
    Raises ValueError for other shapes.
    """
    rows, all_heads, head_dim = qkv.shape
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    heads = all_heads - 2 * kv_heads
    arguments = qkv_arguments(qkv, layer, metadata, rotation, weight, scales)
    if rows == 0:
        return
    tile, pdl = 1 if rows * all_heads <= _FEW and not batch_invariant else _TILE, supports_pdl(qkv.device)
    _rope_write_kv_kernel[(rows, ceil_div(all_heads, tile))](
        *arguments, qkv.stride(0), metadata.tables.stride(0), eps,
        FP8_MAX=FP8_MAX.get(layer.dtype, 0.0), HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        DIM=next_power_of_2(head_dim), BLOCK_SIZE=block_size, ROTATE=rotation is not None,
        NORMED=0 if weight is None else len(weight), TILE=tile, PDL=pdl,
        num_warps=max(tile // 4, 1) * (2 if head_dim > 256 else 1), **pdl_options(pdl),
    )  # fmt: skip


def qkv_arguments(
    qkv: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    weight: Tensor | None,
    scales: Tensor | None,
) -> tuple[Tensor, ...]:
    """Checks the inputs of `rope_write_kv` and returns its kernel's first arguments, with qkv in place of None.

    `fused_decode` begins with the same ones. Raises ValueError.
    """
    rows, all_heads, head_dim = qkv.shape
    heads, kv_heads = all_heads - 2 * layer.shape[2], layer.shape[2]
    metadata.check(rows)
    if head_dim % 2 or layer.shape[4] != head_dim or heads < 1 or not layer.is_contiguous():
        raise ValueError(f"qkv {list(qkv.shape)} does not fit a layer {list(layer.shape)}, or that is not contiguous")
    check_kv_dtype(qkv, layer, scales)
    if qkv.stride(2) != 1 or qkv.stride(1) != head_dim:
        raise ValueError(f"the heads of a row must be contiguous, got strides {qkv.stride()}")
    if weight is not None:
        fits = weight.ndim == 2 and len(weight) in (heads + kv_heads, all_heads) and weight.shape[1] == head_dim
        if not fits or not weight.is_contiguous():
            raise ValueError(f"weight {list(weight.shape)} does not fit {heads + kv_heads} heads of {head_dim}")
    angles = qkv
    if rotation is not None:
        if rotation.shape != (rows, 1, head_dim // 2) or rotation.dtype != torch.complex64:
            raise ValueError(f"rotation {list(rotation.shape)} {rotation.dtype} does not fit {rows} rows of {head_dim}")
        angles = torch.view_as_real(rotation.contiguous())
    optional = (qkv if weight is None else weight, qkv if scales is None else scales)
    return (qkv, layer, metadata.slots, metadata.positions, metadata.tables, angles, *optional)
