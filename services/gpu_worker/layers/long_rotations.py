"""The rotation tables of adapters for longer contexts than the model's: each divides positions by a factor."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blockyard.shared.errors import AdapterError

FLAG = "--long-lora-scaling-factors"


class LongRotations:
    """Where the table of each place's adapter begins. Tables of all factors follow that of the model."""

    def __init__(
        self, factors: Sequence[int], base_len: int, table_len: int, num_places: int, device: torch.device
    ) -> None:
        """base_len: tokens of a sequence without such an adapter. table_len: positions in the table of each factor."""
        self.factors, self._base_len, self._table_len = factors, base_len, table_len
        self._starts = torch.zeros(num_places, dtype=torch.int64, device=device)

    def factor_of(self, context_length: int | None, trained: int) -> int:
        """The factor of an adapter; 1: that of the model. trained: the model's max_position_embeddings.

        Raises AdapterError for one that is not allowed.
        """
        factor = 1 if context_length is None else math.ceil(context_length / trained)
        if factor > 1 and factor not in self.factors:
            allowed = ", ".join(map(str, self.factors))
            raise AdapterError(f"context_length {context_length} needs the factor {factor}; {FLAG} allows {allowed}")
        return factor

    def max_len(self, factor: int, context_length: int | None) -> int:
        """Tokens of the longest sequence of an adapter; 0: as the model's."""
        return 0 if factor == 1 or context_length is None else min(context_length, self._base_len * factor)

    @torch.inference_mode()  # as the tensor was made
    def put(self, place: int, factor: int) -> None:
        self._starts[place] = 0 if factor == 1 else self._table_len * (1 + self.factors.index(factor))

    def rows_of(self, positions: Tensor, places: Tensor) -> Tensor:
        """positions [tokens] int64, places [tokens] int32, below 0 for no adapter -> rows of the tables [tokens]."""
        starts = self._starts.index_select(0, places.clamp(min=0))
        return positions + starts.masked_fill_(places < 0, 0)
