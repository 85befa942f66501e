"""Where the matrices of a layer's adapters are, and their products in torch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.tensor_checks import check_tensor

OFFSETS = 3  # of A, B and the bias
Between = Callable[[Tensor], Tensor]
NO_OFFSET = -1  # of a bias that an adapter does not have


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """The adapters of one layer by place, each with a matrix pair for some parts of the layer's outputs."""

    arena: Tensor  # [elements], memory of all places
    offsets: Tensor  # [places, parts, OFFSETS] int64, in elements: A [rank, in], B [size, rank], bias [size]
    ranks: Tensor  # [places, parts] int32; 0: no matrices for this part
    starts: Tensor  # [parts] int32, first output of each part
    sizes: Tensor  # [parts] int32, outputs
    largest: int  # of `sizes`
    max_rank: int  # no adapter has more
    own_ranks: Tensor | None = None  # [places, parts, 2] int32: A has so many rows, from the first one; None: `ranks`

    @property
    def num_parts(self) -> int:
        return self.starts.shape[0]

    def check(self, x: Tensor, places: Tensor, out: Tensor) -> None:
        """Raises ValueError unless these are x [rows, in], places [rows] int32 and out [rows, outputs]."""
        check_tensor("places", places, (x.shape[0],), torch.int32)
        check_tensor("offsets", self.offsets, (*self.ranks.shape, OFFSETS), torch.int64)
        check_tensor("ranks", self.ranks, (self.offsets.shape[0], self.num_parts), torch.int32)
        if self.own_ranks is not None:
            check_tensor("own_ranks", self.own_ranks, (*self.ranks.shape, 2), torch.int32)
        if x.dim() != 2 or out.dim() != 2 or len(x) != len(out) or x.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError(f"expected rows of x and out alike, got {list(x.shape)} and {list(out.shape)}")


def add_adapters_reference(
    x: Tensor, places: Tensor, table: AdapterTable, out: Tensor, between: Between | None = None
) -> None:
    """Adds the products of adapters to out [rows, outputs], in place. places below 0: a row has none.

    between: see `add_adapters`.
    """
    starts, sizes = table.starts.tolist(), table.sizes.tolist()
    h = torch.zeros(len(x), table.num_parts, table.max_rank, device=x.device)
    for row, place in enumerate(places.tolist()):
        for part in range(table.num_parts if place >= 0 else 0):
            first, count = 0, int(table.ranks[place, part])
            if table.own_ranks is not None:
                first, count = table.own_ranks[place, part].tolist()
            if count:
                a_at = int(table.offsets[place, part, 0])
                a = table.arena[a_at : a_at + count * x.shape[1]].view(count, -1).float()
                h[row, part, first : first + count] = a @ x[row].float()
    if between is not None:
        h = between(h)
    for row, place in enumerate(places.tolist()):
        if place < 0:
            continue
        for part, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            _, b_at, bias_at = table.offsets[place, part].tolist()
            rank, added = int(table.ranks[place, part]), torch.zeros(size, dtype=torch.float32, device=x.device)
            if rank and size:
                b = table.arena[b_at : b_at + size * rank].view(size, rank).float()
                added += b @ h[row, part, :rank]
            if bias_at >= 0:
                added += table.arena[bias_at : bias_at + size].float()
            out[row, start : start + size] = (out[row, start : start + size].float() + added).to(out.dtype)
