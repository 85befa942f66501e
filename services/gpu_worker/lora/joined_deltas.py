"""The deltas of one adapter for one layer on the CPU, in the form that is multiplied."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import in_groups
from blockyard.services.gpu_worker.lora.targets import Delta

SumOfRanks = Callable[[Tensor], Tensor]


class JoinedDeltas:
    """The deltas of one adapter for one layer. All A are one matrix, so that the input is read once."""

    def __init__(
        self, deltas: Sequence[Delta], *, batch_invariant: bool, sum_of_ranks: SumOfRanks | None = None
    ) -> None:
        """sum_of_ranks: adds what each rank has between A and B; None: this rank has all."""
        ranks = [delta.rank for delta in deltas]
        matrices = [delta.a for delta in deltas if delta.a is not None]
        self._a = torch.cat(matrices).T.contiguous() if len(matrices) > 1 else matrices[0].T if matrices else None
        self._ranks, self._deltas = ranks, [(d.start, d.size, None if d.b is None else d.b.T, d.bias) for d in deltas]
        self._in_groups, self._sum_of_ranks = batch_invariant, sum_of_ranks
        self._own = torch.tensor(_own_columns(deltas), dtype=torch.int64)

    def products(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """x [rows, in] -> for each part its first output, and what is added there: [rows, outputs] or [outputs]."""
        shrunk = [] if self._a is None else torch.split(self._shrink(x, self._a), self._ranks, dim=1)
        found = []
        for i, (start, _, b, bias) in enumerate(self._deltas):
            if b is None:
                assert bias is not None
                found.append((start, bias.expand(x.shape[0], -1)))
                continue
            product = self._product(shrunk[i], b)
            found.append((start, product if bias is None else product.add_(bias)))
        return found

    def _shrink(self, x: Tensor, a: Tensor) -> Tensor:
        found = self._product(x, a)
        if self._sum_of_ranks is None:
            return found
        every = x.new_zeros(len(x), sum(self._ranks), dtype=found.dtype)
        return self._sum_of_ranks(every.index_copy_(1, self._own, found))

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return in_groups(lambda rows: rows @ matrix)(x) if self._in_groups else x @ matrix


def _own_columns(deltas: Sequence[Delta]) -> list[int]:
    """The columns, among those of all parts, that the rows of A make."""
    found, start = list[int](), 0
    for delta in deltas:
        if delta.a is not None:
            found += range(start + delta.own_start, start + delta.own_start + len(delta.a))
        start += delta.rank
    return found
