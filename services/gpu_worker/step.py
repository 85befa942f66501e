"""The arguments of a forward pass, built once for each step and shared by all layers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm


class Attend(Protocol):
    """The attention of one step, called by each layer. Implemented in `attention/`."""

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """Computes attention: qkv [tokens, heads + 2 * kv_heads, head_dim] -> [tokens, heads * head_dim].

        First normalises q and k by `norm` and rotates them by rotation [tokens, 1, head_dim / 2], if given, and stores
        K and V of these tokens. A norm whose weight has rows for all heads normalises v, too. In the last layer only
        the rows of `Step.logits_indices` are returned. May write to qkv.
        """


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens that need logits: the last token of each sequence. Each tensor is [n] int64."""

    rows: Tensor  # index in the tokens of the step; arbitrary for padding
    slots: Tensor  # below 0: padding
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a flat batch of tokens."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, index of each token in its sequence
    attend: Attend
    logits_indices: Tensor | None = None  # [n] int64, `LogitsIndices.rows`; None: all tokens
