"""What a forward pass is told about its tokens: built anew each step, the same for every layer."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# layer, q [tokens, heads, head_dim], kv [tokens, 2 * kv_heads, head_dim] (K heads, then V heads)
# -> [tokens, heads * head_dim]; stores the K and V of these tokens first
Attend = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a flat batch of tokens."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, index of each token in its own sequence
    attend: Attend
