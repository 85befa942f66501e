"""The deltas of one adapter for one layer on the CPU, in the form that is multiplied."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import in_groups
from blockyard.services.gpu_worker.lora.targets import Delta


class JoinedDeltas:
    """The deltas of one adapter for one layer. All A are one matrix, so that the input is read once."""

    def __init__(self, deltas: Sequence[Delta], *, batch_invariant: bool) -> None:
        ranks = [delta.rank for delta in deltas]
        matrices = [delta.a for delta in deltas if delta.a is not None]
        self._a = torch.cat(matrices).T.contiguous() if len(matrices) > 1 else matrices[0].T if matrices else None
        self._ranks, self._deltas = ranks, [(d.start, d.size, None if d.b is None else d.b.T, d.bias) for d in deltas]
        self._in_groups = batch_invariant

    def products(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """x [rows, in] -> for each part its first output, and what is added there: [rows, outputs] or [outputs]."""
        shrunk = [] if self._a is None else torch.split(self._product(x, self._a), self._ranks, dim=1)
        found = []
        for i, (start, _, b, bias) in enumerate(self._deltas):
            if b is None:
                assert bias is not None
                found.append((start, bias.expand(x.shape[0], -1)))
                continue
            product = self._product(shrunk[i], b)
            found.append((start, product if bias is None else product.add_(bias)))
        return found

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return in_groups(lambda rows: rows @ matrix)(x) if self._in_groups else x @ matrix
