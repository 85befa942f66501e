"""Arguments of a forward pass, built for each step and shared by all layers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm


class Attend(Protocol):
    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """qkv [tokens, heads + 2 * kv_heads, head_dim] -> [tokens, heads * head_dim]; qkv may be written to.

        First q and k are normalised and rotated by rotation [tokens, 1, head_dim/2], where given, and the K and V of
        these tokens are stored. In the last layer the result has the rows of `Step.logits_indices` alone.
        """


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """Tokens that a step needs logits of: the last one of each sequence. [n] int64 each."""

    rows: Tensor  # index among the step's tokens; any for padding
    slots: Tensor  # below 0: padding
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a flat batch of tokens."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, index of each token in its own sequence
    attend: Attend
    logits_indices: Tensor | None = None  # [n] int64, `LogitsIndices.rows`; None: all tokens
