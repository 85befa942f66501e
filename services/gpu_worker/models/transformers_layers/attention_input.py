"""The input of our attention, q, k and v of a token head after head, from the tensors of transformers."""

import torch
from torch import Tensor


def join_qkv(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query [1, heads, tokens, head_dim], key and value with kv_heads -> [tokens, heads + 2 * kv_heads, head_dim].

    If they lie side by side, as in the output of a joint product, the result is a view of that; otherwise new memory.
    """
    parts = [x[0].transpose(0, 1) for x in (query, key, value)]
    return _view(parts) if _are_side_by_side(parts) else torch.cat(parts, 1)


def _are_side_by_side(parts: list[Tensor]) -> bool:
    """parts: [tokens, heads, head_dim] each."""
    first = parts[0]
    tokens, _, head_dim = first.shape
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for part in parts:
        heads = part.shape[1]
        is_dense = part.stride(2) == 1 and (heads == 1 or part.stride(1) == head_dim)
        is_next = part.untyped_storage()._cdata == storage and part.storage_offset() == end
        if not (is_dense and is_next and (tokens == 1 or part.stride(0) == first.stride(0))):
            return False
        end += heads * head_dim
    return tokens == 1 or first.stride(0) >= end - first.storage_offset()


def _view(parts: list[Tensor]) -> Tensor:
    (tokens, _, head_dim), heads = parts[0].shape, sum(part.shape[1] for part in parts)
    row = heads * head_dim if tokens == 1 else parts[0].stride(0)
    return parts[0].as_strided((tokens, heads, head_dim), (row, head_dim, 1))
