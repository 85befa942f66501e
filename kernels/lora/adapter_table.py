"""Where the matrices of a layer's adapters are, and their products in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.tensor_checks import check_tensor

OFFSETS = 3  # of A, B and the bias
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

    @property
    def num_parts(self) -> int:
        return self.starts.shape[0]

    def check(self, x: Tensor, places: Tensor, out: Tensor) -> None:
        """Raises ValueError unless these are x [rows, in], places [rows] int32 and out [rows, outputs]."""
        check_tensor("places", places, (x.shape[0],), torch.int32)
        check_tensor("offsets", self.offsets, (*self.ranks.shape, OFFSETS), torch.int64)
        check_tensor("ranks", self.ranks, (self.offsets.shape[0], self.num_parts), torch.int32)
        if x.dim() != 2 or out.dim() != 2 or len(x) != len(out) or x.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError(f"expected rows of x and out alike, got {list(x.shape)} and {list(out.shape)}")


def add_adapters_reference(x: Tensor, places: Tensor, table: AdapterTable, out: Tensor) -> None:
    """Adds the products of adapters to out [rows, outputs], in place. places below 0: a row has none."""
    starts, sizes = table.starts.tolist(), table.sizes.tolist()
    for row, place in enumerate(places.tolist()):
        if place < 0:
            continue
        for part, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            a_at, b_at, bias_at = table.offsets[place, part].tolist()
            rank, added = int(table.ranks[place, part]), torch.zeros(size, dtype=torch.float32, device=x.device)
            if rank:
                a = table.arena[a_at : a_at + rank * x.shape[1]].view(rank, -1).float()
                b = table.arena[b_at : b_at + size * rank].view(size, rank).float()
                added += b @ (a @ x[row].float())
            if bias_at >= 0:
                added += table.arena[bias_at : bias_at + size].float()
            out[row, start : start + size] = (out[row, start : start + size].float() + added).to(out.dtype)
