"""What a forward pass is told about its tokens: built anew each step, the same for every layer."""

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
    """Tokens of a step whose hidden states are asked for, [n] int64 each; each is the last of its sequence."""

    rows: Tensor  # of the step; those that pad name any
    slots: Tensor  # below 0: it pads
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a flat batch of tokens."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, index of each token in its own sequence
    attend: Attend
    logits_indices: Tensor | None = None  # [n] int64, `LogitsIndices.rows`; None: all tokens
