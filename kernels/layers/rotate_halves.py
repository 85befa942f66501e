"""Rotation of q and k by the cos and sin tensors of transformers, in one launch on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.apply_rope import rotate_halves_reference as reference_of_one
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_TILE = 8  # heads a program
_FEW = 16 * 132  # with fewer heads in all rows, a program has one head


def rotate_halves_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return reference_of_one(q, cos, sin), reference_of_one(k, cos, sin)


@triton.jit
def _rotate_halves_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, q_row, q_head, k_row, k_head, q_out_row, q_out_head,
    k_out_row, k_out_head, cos_row, sin_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    REST_DIM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): TILE heads of token i, those of q first. REST: numbers behind the rotated ones that are copied
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    of_q, of_k = heads < HEADS, (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    dims = tl.arange(0, DIM)[None, :]
    q, k = q_ptr + row * q_row + heads * q_head, k_ptr + row * k_row + (heads - HEADS) * k_head
    q_out = q_out_ptr + row * q_out_row + heads * q_out_head
    k_out = k_out_ptr + row * k_out_row + (heads - HEADS) * k_out_head
    in_half = dims < HALF
    in_q, in_k = of_q & in_half, of_k & in_half
    low = tl.load(q + dims, mask=in_q, other=0.0).to(tl.float32) + tl.load(k + dims, mask=in_k, other=0.0)
    high = tl.load(q + HALF + dims, mask=in_q, other=0.0).to(tl.float32)
    high += tl.load(k + HALF + dims, mask=in_k, other=0.0)
    cos, sin = cos_ptr + row * cos_row + dims, sin_ptr + row * sin_row + dims
    cos_low, cos_high = tl.load(cos, mask=in_half, other=0.0), tl.load(cos + HALF, mask=in_half, other=0.0)
    sin_low, sin_high = tl.load(sin, mask=in_half, other=0.0), tl.load(sin + HALF, mask=in_half, other=0.0)
    turned_low = low * cos_low.to(tl.float32) - high * sin_low.to(tl.float32)
    turned_high = high * cos_high.to(tl.float32) + low * sin_high.to(tl.float32)
    tl.store(q_out + dims, turned_low, mask=in_q)
    tl.store(k_out + dims, turned_low, mask=in_k)
    tl.store(q_out + HALF + dims, turned_high, mask=in_q)
    tl.store(k_out + HALF + dims, turned_high, mask=in_k)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST_DIM)[None, :]
        in_rest = rest < 2 * HALF + REST
        tl.store(q_out + rest, tl.load(q + rest, mask=of_q & in_rest, other=0.0), mask=of_q & in_rest)
        tl.store(k_out + rest, tl.load(k + rest, mask=of_k & in_rest, other=0.0), mask=of_k & in_rest)


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """Rotates q and k by cos and sin, as `rotate_halves_reference`. Returns q and k themselves if `in_place`.

    q [1, heads, tokens, head_dim] and k [1, kv_heads, tokens, head_dim] may be strided, in all but the last dimension,
    and must not overlap. cos and sin are [1, tokens, rotary_dim], and the numbers of a head behind rotary_dim stay.
    Raises ValueError for other shapes, and dtypes that differ.
    """
    _check(q, k, cos, sin)
    (_, heads, tokens, head_dim), kv_heads, rotary_dim = q.shape, k.shape[1], cos.shape[2]
    outs = (q, k) if in_place else (_empty(q), _empty(k))
    if tokens == 0:
        return outs
    strides = [stride for x in (q, k, *outs) for stride in (x.stride(2), x.stride(1))]
    rest = 0 if in_place else head_dim - rotary_dim
    tile, pdl = 1 if tokens * (heads + kv_heads) <= _FEW else _TILE, supports_pdl(q.device)
    _rotate_halves_kernel[(tokens, ceil_div(heads + kv_heads, tile))](
        q, k, *outs, cos, sin, *strides, cos.stride(1), sin.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, HALF=rotary_dim // 2, DIM=next_power_of_2(rotary_dim // 2), REST=rest,
        REST_DIM=next_power_of_2(max(rest, 1)), TILE=tile, PDL=pdl, num_warps=max(tile // 4, 1), **pdl_options(pdl),
    )  # fmt: skip
    return outs


def _empty(x: Tensor) -> Tensor:
    """[1, heads, tokens, head_dim], with the heads of a token side by side."""
    _, heads, tokens, head_dim = x.shape
    return torch.empty((1, tokens, heads, head_dim), dtype=x.dtype, device=x.device).transpose(1, 2)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != 1 or k.shape != (1, k.shape[1], *q.shape[2:]):
        raise ValueError(f"expected [1, heads, tokens, head_dim] of q and k, got {list(q.shape)} and {list(k.shape)}")
    tokens, head_dim = q.shape[2:]
    if cos.shape != sin.shape or cos.shape[:-1] != (1, tokens) or cos.shape[2] % 2 or not 0 < cos.shape[2] <= head_dim:
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} do not fit {tokens} tokens of {head_dim}")
    if len({x.dtype for x in (q, k, cos, sin)}) > 1:
        raise ValueError(f"dtypes differ: {q.dtype}, {k.dtype}, {cos.dtype}, {sin.dtype}")
    if any(x.stride(-1) != 1 for x in (q, k, cos, sin)):
        raise ValueError("the numbers of a head must be contiguous")
