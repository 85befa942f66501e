"""Where adapters have rows of their own of the embedding or of the head, and what these change, in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.tensor_checks import check_tensor

COLUMNS = 5  # of `AdapterTokens.columns`


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """The rows of adapters by place.

    Columns of a place: how many rows it has, where they begin [rows, width], the rank of its matrices, where A
    [tokens, rank] begins, and B [width, rank]; in elements of the arena.
    """

    arena: Tensor  # [elements], memory of all adapters
    columns: Tensor  # [places, COLUMNS] int64
    token_ids: Tensor  # [places, most rows] int32: the token of each row

    def check(self, places: Tensor, rows: int) -> None:
        """Raises ValueError."""
        check_tensor("places", places, (rows,), torch.int32)
        check_tensor("columns", self.columns, (len(self.token_ids), COLUMNS), torch.int64)
        check_tensor("token_ids", self.token_ids, tuple(self.token_ids.shape), torch.int32)

    def rows_of(self, place: int, width: int) -> tuple[Tensor, Tensor]:
        """The tokens [n] and the rows [n, width] of a place."""
        num, at = self.columns[place, :2].tolist()
        return self.token_ids[place, :num], self.arena[at : at + num * width].view(num, width)


def adapt_embeddings_reference(found: Tensor, token_ids: Tensor, places: Tensor, table: AdapterTokens) -> None:
    """See `adapt_embeddings`."""
    width = found.shape[1]
    for row, (place, token) in enumerate(zip(places.tolist(), token_ids.tolist(), strict=True)):
        if place < 0:
            continue
        ids, values = table.rows_of(place, width)
        own = found[row].float()
        for at in torch.nonzero(ids == token).flatten().tolist():
            own = values[at].float()
        rank, a_at, b_at = table.columns[place, 2:].tolist()
        if rank:
            a = table.arena[a_at + token * rank : a_at + (token + 1) * rank].float()
            own = own + table.arena[b_at : b_at + width * rank].view(width, rank).float() @ a
        found[row] = own.to(found.dtype)


def replace_logits_reference(x: Tensor, places: Tensor, table: AdapterTokens, out: Tensor) -> None:
    """See `replace_logits`."""
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            ids, values = table.rows_of(place, x.shape[1])
            out[row, ids.long()] = (values.float() @ x[row].float()).to(out.dtype)
