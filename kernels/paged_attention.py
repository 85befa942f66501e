"""Attention over KV that lies in blocks of a pool, as plain torch: the CPU path, and the reference of later kernels.

A pool layer is [num_blocks, 2, kv_heads, block_size, head_dim], the 2 being K and V. Writes see it as rows of
head_dim (`row_index`), reads as chunks of one head's block (`chunk_index`); both indices are computed once a step
and serve every layer. What lies behind a sequence's length must be finite: it is multiplied by 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def row_index(blocks: Tensor, offsets: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Where tokens go: blocks [tokens], offsets [tokens] in the block -> [tokens, 2 * kv_heads] int64."""
    heads = torch.arange(2 * kv_heads, device=blocks.device)
    return (blocks.long()[:, None] * (2 * kv_heads) + heads) * block_size + offsets.long()[:, None]


def chunk_index(blocks: Tensor, kv_heads: int) -> Tensor:
    """What sequences read: blocks [seqs, blocks_each] -> flat index of chunks in the order seq, K/V, head, block."""
    heads = torch.arange(2 * kv_heads, device=blocks.device)
    return (blocks.long()[:, None, :] * (2 * kv_heads) + heads[:, None]).reshape(-1)


def write_kv_reference(layer: Tensor, rows: Tensor, kv: Tensor) -> None:
    """Stores kv [tokens, 2 * kv_heads, head_dim] at rows [tokens, 2 * kv_heads] of a pool layer."""
    layer.view(-1, layer.shape[-1]).index_put_((rows,), kv)


def gather_kv_reference(layer: Tensor, chunks: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """K and V, each [num_seqs, kv_heads, tokens, head_dim], of the blocks that `chunk_index` was made from."""
    _, _, kv_heads, block_size, head_dim = layer.shape
    rows = layer.view(-1, block_size * head_dim).index_select(0, chunks)
    keys, values = rows.view(num_seqs, 2, kv_heads, -1, head_dim).unbind(1)
    return keys, values


def decode_attention_reference(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One query token a sequence, all sequences in one call.

    q [seqs, heads, head_dim]; keys, values as `gather_kv_reference` gives them; mask [seqs, 1, 1, tokens] is added to
    the scores, None where every key counts. Returns [seqs, heads * head_dim].
    """
    num_seqs, num_heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.view(num_seqs, kv_heads, num_heads // kv_heads, head_dim)  # heads that share a K/V head are its rows
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(num_seqs, num_heads * head_dim)


def prefill_attention_reference(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The last tokens of one sequence against all of it.

    q [tokens, heads, head_dim]; keys, values [1, kv_heads, known, head_dim]; mask [tokens, known] is added to the
    scores, None for plain causal attention with tokens == known. Returns [tokens, heads * head_dim].
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)
