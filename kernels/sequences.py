"""What attention on a GPU is told of the rows of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the sequences of a step lie, on the device."""

    slots: Tensor  # [rows] int64, row of `tables`; below 0: a row that pads, of no sequence
    positions: Tensor  # [rows] int64, of the new token; all up to it are attended to
    tables: Tensor  # [slots, blocks] int32

    def check(self, rows: int) -> None:
        """Raises ValueError."""
        if self.slots.shape != (rows,) or self.positions.shape != (rows,) or self.tables.ndim != 2:
            raise ValueError(f"slots {list(self.slots.shape)}, positions {list(self.positions.shape)} for {rows} rows")
        if self.slots.dtype != torch.int64 or self.positions.dtype != torch.int64 or self.tables.dtype != torch.int32:
            raise ValueError(
                f"expected int64, int64, int32: {self.slots.dtype}, {self.positions.dtype}, {self.tables.dtype}"
            )
        if self.slots.stride(0) != 1 or self.positions.stride(0) != 1 or self.tables.stride(1) != 1:
            raise ValueError("slots, positions and the rows of tables must be contiguous")
