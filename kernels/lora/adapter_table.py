"""Where the matrices of a layer's adapters are, and their products in torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.tensor_checks import check_tensor

OFFSETS = 3  # of A, B and the bias
ALIGNED = 16  # elements: matrices begin at multiples of so many, for wide loads
Between = Callable[[Tensor], Tensor]
NO_OFFSET = -1  # of a bias that an adapter does not have


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """An order of rows, in which each tile has one owner: a place, or of pairs of row and expert an expert.

    Tile i has the rows [i * tile, (i + 1) * tile) of `rows`, where a number behind all rows is none; if tiles have one
    row, tile i has row i. Of larger tiles those without rows are behind the others, and their owner is below 0.
    """

    rows: Tensor  # [tiles * tile] int32
    owners: Tensor  # [tiles] int32
    tile: int
    is_early: bool = True  # other kernels run between the one that writes them and the products that read them


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """The adapters of one layer by place, each with a matrix pair for some parts of the layer's outputs.

    Of a layer of experts each expert has entries of its own, for each of its parts.
    """

    arena: Tensor  # [elements], memory of all adapters
    # [places, entries, OFFSETS] int64, in elements of the arena and multiples of ALIGNED: A [rank, in], B [size, rank],
    # bias [size]; entries of a place are contiguous: expert after expert, and of each one part after part
    offsets: Tensor
    ranks: Tensor  # [places, entries] int32; 0: no matrices for this part
    starts: Tensor  # [parts] int32, first output of each part
    sizes: Tensor  # [parts] int32, outputs
    largest: int  # of `sizes`
    max_rank: int  # no adapter has more
    own_ranks: Tensor | None = None  # [places, entries, 2] int32: A has so many rows, from the first one; None: `ranks`
    is_wide: bool = False  # `starts` and `sizes` are multiples of ALIGNED
    batch_invariant: bool = False  # what is added to a row does not depend on other rows, to the last bit

    @property
    def num_parts(self) -> int:
        return self.starts.shape[0]

    @property
    def num_experts(self) -> int:
        return self.ranks.shape[1] // self.num_parts

    @property
    def place_stride(self) -> int:
        """Entries from one place to the next."""
        return self.ranks.stride(0)

    def check(self, x: Tensor, places: Tensor, experts: Tensor | None = None) -> None:
        """Raises ValueError unless these are x [rows, in], places [rows] int32 and no experts; or x [rows or pairs,
        in], places [rows] and experts [rows, any] int32."""
        check_tensor("places", places, places.shape[:1], torch.int32)
        pairs = len(places) if experts is None else experts.numel()
        if experts is not None:
            check_tensor("experts", experts, (len(places), *experts.shape[1:]), torch.int32)
        self._check_entries("offsets", self.offsets, torch.int64, OFFSETS)
        self._check_entries("ranks", self.ranks, torch.int32)
        if self.own_ranks is not None:
            self._check_entries("own_ranks", self.own_ranks, torch.int32, 2)
        if x.dim() != 2 or len(x) not in (len(places), pairs) or x.stride(1) != 1:
            raise ValueError(f"expected x [{len(places)} or {pairs}, in], got {list(x.shape)} in steps of {x.stride()}")

    def _check_entries(self, name: str, found: Tensor, dtype: torch.dtype, *columns: int) -> None:
        shape, stride = (*self.ranks.shape, *columns), self.place_stride * (columns or (1,))[0]
        if found.shape != shape or found.dtype != dtype or (len(found) > 1 and found.stride(0) != stride):
            raise ValueError(f"{name}: expected {list(shape)} of {dtype}, got {list(found.shape)} of {found.dtype}")


def start_adapters_reference(
    x: Tensor,
    places: Tensor,
    table: AdapterTable,
    between: Between | None = None,
    *,
    is_ordered: bool = False,
    **options: Any,
) -> Callable[[Tensor], None]:
    """See `start_adapters`. Here all is done at the end."""

    def add_to(out: Tensor) -> None:
        add_adapters_reference(x, places, table, out, between, **options)

    return add_to


def add_adapters_reference(
    x: Tensor,
    places: Tensor,
    table: AdapterTable,
    out: Tensor,
    between: Between | None = None,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
    tiles: AdapterTiles | None = None,
    norm: RMSNorm | None = None,
    gated: bool = False,
) -> None:
    """See `add_adapters`. The order of `tiles` changes nothing."""
    if gated:
        gate, up = x.float().chunk(2, -1)
        x = (F.silu(gate) * up).to(x.dtype)
    x = x if norm is None else norm(x)
    starts, sizes = table.starts.tolist(), table.sizes.tolist()
    h, own = torch.zeros(len(out), table.num_parts, table.max_rank, device=x.device), len(out) // max(len(places), 1)
    chosen = [0] * len(out) if experts is None else experts.flatten().tolist()
    places_of = [
        place if 0 <= expert < table.num_experts else -1
        for expert, place in zip(chosen, places.repeat_interleave(own).tolist(), strict=True)
    ]
    of_pair = [(place, expert * table.num_parts) for place, expert in zip(places_of, chosen, strict=True)]
    for pair, (place, entry) in enumerate(of_pair):
        for part in range(table.num_parts if place >= 0 else 0):
            first, count = 0, int(table.ranks[place, entry + part])
            if table.own_ranks is not None:
                first, count = table.own_ranks[place, entry + part].tolist()
            if count:
                a_at = int(table.offsets[place, entry + part, 0])
                a = table.arena[a_at : a_at + count * x.shape[1]].view(count, -1).float()
                h[pair, part, first : first + count] = a @ x[pair * len(x) // len(out)].float()
    if between is not None:
        h = between(h)
    for pair, (place, entry) in enumerate(of_pair):
        for part, (start, size) in enumerate(zip(starts, sizes, strict=True) if place >= 0 else ()):
            _, b_at, bias_at = table.offsets[place, entry + part].tolist()
            rank, added = int(table.ranks[place, entry + part]), torch.zeros(size, dtype=torch.float32, device=x.device)
            if rank and size:
                b = table.arena[b_at : b_at + size * rank].view(size, rank).float()
                added += b @ h[pair, part, :rank]
            if table.offsets[place, entry + part, 2] >= 0:
                added += table.arena[bias_at : bias_at + size].float()
            if weights is not None:
                added *= weights.flatten()[pair]
            out[pair, start : start + size] = (out[pair, start : start + size].float() + added).to(out.dtype)
