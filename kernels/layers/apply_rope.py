"""Rotary position embedding (RoFormer, https://arxiv.org/abs/2104.09864) on interleaved pairs.

Checkpoints pair element i of a head with element i + head_dim/2. The loader reorders the rows of the q and k weights,
and of the q and k norms, to 0, d/2, 1, d/2+1, ... Then a pair is one complex number and the rotation of q and k is one
multiplication. Both are reordered alike, so q @ k does not change.
"""

import torch
from torch import Tensor


def interleave_pairs(rows: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """[heads * head_dim, ...] in checkpoint order -> the same rows with the two halves of each head interleaved.

    rotary_dim: of each head only so many first rows are rotated, and only these are reordered; None: all.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    halves = heads[:, :rotary_dim].unflatten(1, (2, rotary_dim // 2))
    return torch.cat((halves.transpose(1, 2).flatten(1, 2), heads[:, rotary_dim:]), 1).reshape(rows.shape)


def apply_rope_reference(x: Tensor, rotation: Tensor) -> None:
    """Rotates x [tokens, heads, head_dim] in place by rotation [tokens, 1, head_dim/2] complex64.

    The last dimension of x must be contiguous. Other dtypes than float32 are rotated in float32.
    """
    pairs = x.view(*x.shape[:-1], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))


def rotate_halves_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, heads, tokens, head_dim] rotated by cos and sin [1, tokens, rotary_dim], in a new tensor.

    Element i of the first rotary_dim of a head is paired with i + rotary_dim/2, as transformers does. Types of 16 bits
    are rotated in float32 and rounded once.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None].to(exact), sin[:, None].to(exact)
    low, high = x[..., : cos.shape[-1]].to(exact).chunk(2, -1)
    rotated = torch.cat((low, high), -1) * cos + torch.cat((-high, low), -1) * sin
    return torch.cat((rotated.to(x.dtype), x[..., cos.shape[-1] :]), -1)
