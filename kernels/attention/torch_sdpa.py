"""Attention over the paged KV cache in plain torch: the CPU path, and a reference of the kernels.

A layer of the cache is [num_blocks, planes, kv_heads, block_size, head_dim], the planes being K and V, or K alone where
V is a part of it. Writes see it as rows [num_blocks * planes * kv_heads * block_size, head_dim] (`row_index`), reads as
chunks, one head's block each, [num_blocks * planes * kv_heads, block_size * head_dim] (`chunk_index`). Both indices are
computed once a step, on the host, and serve every layer with as many planes and heads. The
cache behind a sequence's end must be finite: it is multiplied by 0.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules

Ints = npt.NDArray[np.int64]


def row_index(blocks: Ints, offsets: Ints, kept_heads: int, block_size: int) -> Ints:
    """Rows where tokens are written: blocks [tokens], offsets [tokens] in the block -> [tokens, kept_heads].

    kept_heads: heads of K and of V together.
    """
    heads = np.arange(kept_heads) * block_size
    return (blocks * (kept_heads * block_size) + offsets)[:, None] + heads


def chunk_index(blocks: Ints, kept_heads: int) -> Ints:
    """Chunks that sequences read: blocks [seqs, blocks_each] -> flat index in the order seq, K/V, head, block."""
    heads = np.arange(kept_heads)[:, None]
    return ((blocks * kept_heads)[:, None, :] + heads).reshape(-1)


def write_kv_reference(rows: Tensor, index: Tensor, kv: Tensor) -> None:
    """Stores kv [tokens, planes * kv_heads, head_dim] in a layer seen as rows, at index [tokens, planes * kv_heads]."""
    rows.index_put_((index,), kv)


def gather_kv_reference(
    chunks: Tensor, index: Tensor, num_seqs: int, kv_heads: int, head_dim: int, planes: int = 2
) -> Tensor:
    """[num_seqs, planes, kv_heads, tokens, head_dim] from a layer seen as chunks."""
    return chunks.index_select(0, index).view(num_seqs, planes, kv_heads, -1, head_dim)


def split_kv(kv: Tensor, latent_dim: int | None) -> tuple[Tensor, Tensor]:
    """kv [seqs, planes, ...] -> K and V. latent_dim: V is the first so many numbers of K; None: V is a plane."""
    if latent_dim is not None:
        return kv[:, 0], kv[:, 0, ..., :latent_dim]
    keys, values = kv.unbind(1)
    return keys, values


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., keys]. sinks [..., 1]: a score that is in the sum, and has no value."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


def attention_by_scores(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    rules: ScoreRules,
    sinks: Tensor | None,
) -> Tensor:
    """Attention that stores all scores, which torch's own does not, for what torch's own lacks.

    q [..., rows, head_dim]; keys and values [..., tokens, head_dim]; mask fits [..., rows, tokens], and is added
    to scores with their cap. sinks: of `rules` as [..., rows, 1]. The window is in the mask.
    """
    scores, scale, soft_cap = q @ keys.mT, rules.scale, rules.soft_cap
    scores = scores.mul_(scale) if soft_cap is None else scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores = scores + mask
    return softmax_with_sinks(scores.float(), sinks).to(values.dtype) @ values


def decode_attention_reference(
    q: Tensor, kv: Tensor, mask: Tensor | None, rules: ScoreRules, latent_dim: int | None = None
) -> Tensor:
    """One query token a sequence, all sequences in one call.

    q [seqs, heads, head_dim]; kv [seqs, planes, kv_heads, tokens, head_dim]; mask [seqs, 1, 1, tokens] is added to the
    scores, None where all keys are visible; the window of `rules` is in it; latent_dim: see `split_kv`. Returns [seqs,
    heads * size of a V head].
    """
    num_seqs, num_heads, head_dim = q.shape
    keys, values = split_kv(kv, latent_dim)
    grouped = q.view(num_seqs, kv.shape[2], -1, head_dim)  # heads that share a K/V head are its rows
    if rules.soft_cap is not None or rules.sinks is not None:
        of_rows = None if rules.sinks is None else rules.sinks.view(kv.shape[2], -1, 1)
        out = attention_by_scores(grouped, keys, values, mask, rules, of_rows)
    else:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=rules.scale)
    return out.reshape(num_seqs, num_heads * values.shape[-1])


def prefill_attention_reference(
    q: Tensor, kv: Tensor, mask: Tensor | None, rules: ScoreRules, latent_dim: int | None = None
) -> Tensor:
    """The last tokens of one sequence against all of its tokens.

    q [tokens, heads, head_dim]; kv [1, planes, kv_heads, known, head_dim]; mask [tokens, known] is added to the scores,
    None for causal attention with tokens == known; the window of `rules` is in it; latent_dim: see `split_kv`. Returns
    [tokens, heads * size of a V head].
    """
    keys, values = split_kv(kv, latent_dim)
    if rules.soft_cap is not None or rules.sinks is not None:
        if mask is None:
            mask = torch.full((len(q), len(q)), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
        grouped = q.view(len(q), keys.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)[None]  # heads of a K/V head
        of_rows = None if rules.sinks is None else rules.sinks.view(keys.shape[1], -1, 1, 1)
        out = attention_by_scores(grouped, keys[:, :, None], values[:, :, None], mask, rules, of_rows)
        return out[0].flatten(0, 1).transpose(0, 1).reshape(q.shape[0], -1)
    if mask is not None and q.device.type == "cuda":
        # with a mask and grouped heads torch falls back to a kernel that stores all scores: gigabytes
        groups = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=rules.scale,
        enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)
