"""What a matrix product is made of in a checkpoint, and which rows or columns of it a rank has.

With tensor parallelism a rank has some outputs of a layer (`Split.OUTPUTS`), and the layer behind reads them: it has
those inputs (`Split.INPUTS`), and its products are partial sums, which are added over all ranks. Outputs are divided by
units that stay whole: heads of attention, groups, or single rows. With fewer units than ranks, several ranks have the
same one. Ranks may have different numbers of units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard, share, share_of_groups, single_units

Arrange = Callable[[Tensor], Tensor]

SUFFIXES = (".weight", ".bias")  # of names in checkpoints, behind the parts' names


class Split(Enum):
    """The dimension of a matrix that is divided among ranks."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"  # a rank's product is a part of a sum
    NONE = "none"  # each rank has the whole


class Rows(NamedTuple):
    """Successive features that are divided by equal units. One unit: all ranks have them all."""

    size: int
    units: int
    groups: int | None = None  # units are divided by groups, see `share_of_groups`; None: one by one

    def share(self, shard: Shard) -> range:
        """Returns the features of a rank. Single features are divided by larger steps, see `single_units`."""
        if shard.size == 1:
            return range(self.size)
        units = single_units(self.size, shard.size) if self.units == self.size else self.units
        found = share(units, shard) if self.groups is None else share_of_groups(units, self.groups, shard)
        unit = self.size // units
        return range(found.start * unit, found.stop * unit)

    @property
    def unit(self) -> int:
        """Features of a unit."""
        return self.size // self.units

    def own_units(self, shard: Shard) -> range:
        own = self.share(shard)
        return range(own.start // self.unit, own.stop // self.unit)

    def widths(self, size: int) -> list[int]:
        """Returns the number of features of each of `size` ranks."""
        return [len(self.share(Shard(rank, size))) for rank in range(size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPart:
    """One matrix of a checkpoint in a layer."""

    name: str  # without `SUFFIXES`
    rows: tuple[Rows, ...]  # the output features that it makes, in order
    arrange: Arrange | None = None  # makes them of the rows that the checkpoint has
    stored_rows: int | None = None  # that the checkpoint has; None: as many
    interleaved: bool = False  # the checkpoint has one row of each of `rows`, which are equal, in turn

    @property
    def size(self) -> int:
        return sum(rows.size for rows in self.rows)

    def share(self, shard: Shard) -> list[range]:
        """Returns the rows of a rank among the part's."""
        start, found = 0, []
        for rows in self.rows:
            own = rows.share(shard)
            found.append(range(start + own.start, start + own.stop))
            start += rows.size
        return found

    def in_order(self, rows: Tensor) -> Tensor:
        """Brings the part's rows [out, ...] from the checkpoint's order into that of the product."""
        if self.interleaved:
            rows = torch.unflatten(rows, 0, (-1, len(self.rows))).transpose(0, 1).flatten(0, 1)
        return rows if self.arrange is None else self.arrange(rows)


def part(name: str, size: int | Rows, units: int | None = None, arrange: Arrange | None = None) -> MatrixPart:
    """A matrix of which all rows are divided alike. units: heads or groups; None: single rows, or `size` rows."""
    rows = size if isinstance(size, Rows) else Rows(size, size if units is None else units)
    return MatrixPart(name=name, rows=(rows,), arrange=arrange)


@dataclass(frozen=True, slots=True)
class Cut:
    """Takes a rank's share of a weight."""

    dim: int  # counted from the end
    ranges: tuple[range, ...]

    def __call__(self, whole: Tensor) -> Tensor:
        found = [whole.narrow(self.dim, own.start, len(own)) for own in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """The parts of a matrix product with their names in the checkpoint, given by the model family."""

    parts: tuple[MatrixPart, ...]
    inputs: Rows
    split: Split = Split.NONE
    bias: bool = False
    transposed: bool = False  # the checkpoint has matrices as [in, out]
    weighted: bool = False  # its input has the weight of its output, so that it takes no bias of an adapter

    @property
    def in_features(self) -> int:
        return self.inputs.size

    def num_inputs(self, shard: Shard) -> int:
        return len(self.inputs.share(shard)) if self.split is Split.INPUTS else self.in_features

    def rows(self, one: MatrixPart, shard: Shard) -> list[range]:
        """Returns the rows of a rank among a part's."""
        return one.share(shard if self.split is Split.OUTPUTS else WHOLE)

    def own_sizes(self, shard: Shard) -> list[int]:
        """Returns the number of a rank's outputs of each part."""
        return [sum(map(len, self.rows(one, shard))) for one in self.parts]

    def num_outputs(self, shard: Shard) -> int:
        return sum(self.own_sizes(shard))

    def cut(self, one: MatrixPart, shard: Shard) -> Cut | None:
        """Returns what takes a rank's share of a part's weight [..., out, in]. None: the whole.

        Of an interleaved part: of [..., runs, out, in].
        """
        if shard.size == 1 or self.split is Split.NONE:
            return None
        if self.split is Split.INPUTS:
            return Cut(-1, (self.inputs.share(shard),))
        return Cut(-2, self._ranges(one, shard))

    def row_cut(self, one: MatrixPart, shard: Shard) -> Cut | None:
        """As `cut`, of a tensor with one number for each row, [..., out]."""
        if shard.size == 1 or self.split is not Split.OUTPUTS:
            return None
        return Cut(-1, self._ranges(one, shard))

    def bias_cut(self, one: MatrixPart, shard: Shard) -> Arrange | None:
        """As `row_cut`, of the bias: of partial sums it is in the first one alone."""
        if self.split is Split.INPUTS and shard.rank:
            return torch.zeros_like
        return self.row_cut(one, shard)

    def _ranges(self, one: MatrixPart, shard: Shard) -> tuple[range, ...]:
        return (one.rows[0].share(shard),) if one.interleaved else tuple(one.share(shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """One product of all experts of a layer."""

    num_experts: int
    matrix: LinearSpec  # of one expert; its names have "{}" in the place of a number, if they are not stacked
    stacked: bool = False  # the checkpoint has one tensor [experts, out, in] for all experts
    suffixes: tuple[str, str] = SUFFIXES  # of names
    own: range | None = None  # experts that this rank has whole; None: it has a share of each

    @property
    def num_own(self) -> int:
        return self.num_experts if self.own is None else len(self.own)
