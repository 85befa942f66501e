"""Which part of an adapter's matrices a rank has: an adapter follows the matrix that it changes.

B is divided with the outputs of the matrix, A with its inputs, and the other one is whole. With `--fully-sharded-loras`
the other one is divided, too. Of a matrix divided by outputs that is A: a rank shrinks to some of the numbers between A
and B. Of one divided by inputs it is B: a rank expands to some of the outputs. Between the two products all ranks add
what they have.
"""

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.linear_spec import LinearSpec, MatrixPart, Split
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard


class LayerShare:
    """A rank's part of what adapters add to one layer."""

    def __init__(self, spec: LinearSpec, shard: Shard = WHOLE, *, fully_sharded: bool = False) -> None:
        self._split, self._shard = spec.split, shard
        self.sums_between = fully_sharded and shard.size > 1 and spec.split is not Split.NONE
        self.inputs = spec.inputs.share(shard) if spec.split is Split.INPUTS else range(spec.in_features)
        self._rows = [self._rows_of(spec, one) for one in spec.parts]
        self.sizes = [sum(map(len, rows)) for rows in self._rows]  # outputs of each part
        self.starts, end = list[int](), 0  # first output of each part in the rank's product
        for rows, size in zip(self._rows, spec.own_sizes(shard), strict=True):
            self.starts.append(end + (rows[0].start if self._divides_b else 0))
            end += size
        self._part_sizes = [one.size for one in spec.parts]
        self._is_whole = shard.size == 1 or spec.split is Split.NONE

    @property
    def _divides_b(self) -> bool:
        return self.sums_between and self._split is Split.INPUTS

    @property
    def has_bias(self) -> bool:
        """Whether this rank adds the bias: of partial sums the first one has it, unless each has some outputs."""
        return self._split is not Split.INPUTS or self._divides_b or not self._shard.rank

    def _rows_of(self, spec: LinearSpec, one: MatrixPart) -> list[range]:
        return [_portion(one.size, self._shard)] if self._divides_b else spec.rows(one, self._shard)

    def own_rank(self, rank: int) -> range:
        """The numbers between A and B that this rank computes."""
        return _portion(rank, self._shard) if self.num_shrunk > 1 else range(rank)

    @property
    def num_shrunk(self) -> int:
        """The ranks that the rows of A are divided among."""
        return self._shard.size if self.sums_between and self._split is Split.OUTPUTS else 1

    def cut_a(self, a: Tensor) -> Tensor:
        """a [rank, in] -> [own rank, own in]."""
        if self._is_whole:
            return a
        rows, cols = self.own_rank(a.shape[0]), self.inputs
        return a[rows.start : rows.stop, cols.start : cols.stop].clone()

    def cut_rows(self, values: Tensor, first: int, count: int = 1) -> Tensor:
        """values [out, ...] of successive parts in the order of their products -> [own out, ...].

        first, count: of the parts.
        """
        if self._is_whole:
            return values
        found, start = list[Tensor](), 0
        for part in range(first, first + count):
            found += [values[start + own.start : start + own.stop] for own in self._rows[part]]
            start += self._part_sizes[part]
        return torch.cat(found)


def _portion(count: int, shard: Shard) -> range:
    """Some of `count`, in order: none on a rank, if there are fewer than ranks."""
    return range(count * shard.rank // shard.size, count * (shard.rank + 1) // shard.size)
