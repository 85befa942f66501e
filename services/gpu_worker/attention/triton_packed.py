"""Attention of one step of an encoder on a GPU, by the kernel for packed sequences."""

import torch
from torch import Tensor

from blockyard.kernels.attention.packed.packed_attention import packed_attention
from blockyard.kernels.attention.score_rules import ScoreRules


class TritonPackedProduct:
    """Implements `packed_attention.PackedProduct`."""

    def __init__(self, starts: Tensor, max_seq_len: int) -> None:
        """starts [num_seqs + 1] int32, on the device: the first row of each sequence, and the end of the last."""
        self._starts, self._max_seq_len = starts, max_seq_len

    def __call__(self, qkv: Tensor, rules: ScoreRules, num_heads: int) -> Tensor:
        out = torch.empty(qkv.shape[0], num_heads * qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
        packed_attention(qkv, self._starts, rules, num_heads, self._max_seq_len, out)
        return out
