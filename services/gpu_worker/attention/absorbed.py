"""Latent attention with absorbed up-projections in plain torch: the backend attends to rows as they are stored.

The matrix of K is moved into the query, and that of V behind the attention. Rows are then the K of a single head, and
their first numbers are its V, which every backend on the CPU computes as it does other layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear import Product
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices


class ChosenRows:
    """Computes all rows of a layer, and returns the requested ones. Implements `step.Attend`."""

    def __init__(self, attend: Attend, rows: Tensor) -> None:
        """rows: [n] int64."""
        self._attend, self._rows = attend, rows

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        return self._attend(layer, qkv, rotation, norm).index_select(0, self._rows)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        return self._attend.latent(layer, query, rotation, latent).index_select(0, self._rows)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return ChosenRows(self._attend, indices.rows)


def attend_absorbed(
    attend: Attend,
    layer: int,
    query: Tensor,
    rotation: Tensor | None,
    latent: LatentRows,
    wrap: Callable[[Product], Product] = lambda product: product,
) -> Tensor:
    """Computes a latent layer by `attend`, called with rows as K: see `step.Attend.latent` for arguments and result.

    wrap: changes the products by head, [rows, heads * in] -> [rows, heads * out].
    """
    heads, size = query.shape[1], latent.up.shape[2]
    packed = query.new_empty(len(query), heads + 1, latent.rows.shape[1])  # absorbed queries, then the row
    absorbed = wrap(_by_head(latent.to_keys))(query[..., : latent.plain_dim].flatten(1)).view(-1, heads, size)
    if latent.adapted is not None:
        latent.adapted.add_to_queries(absorbed, query[..., : latent.plain_dim])
    packed[:, :heads, :size] = absorbed
    packed[:, :heads, size:] = query[..., latent.plain_dim :]
    packed[:, heads, :size] = latent.norm(latent.rows[:, :size].contiguous())
    packed[:, heads, size:] = latent.rows[:, size:]
    if rotation is not None:
        apply_rope_reference(packed[..., size:], rotation)
    attended = attend(layer, packed)
    out = wrap(_by_head(latent.to_values))(attended)
    if latent.adapted is not None:
        latent.adapted.add_to_values(out.view(len(out), heads, -1), attended.view(len(out), heads, size))
    return out


def _by_head(weight: Tensor) -> Product:
    """A product with a matrix for each head, weight [heads, in, out]."""

    def product(x: Tensor) -> Tensor:
        each = x.view(len(x), len(weight), -1).transpose(0, 1)
        return torch.bmm(each, weight).transpose(0, 1).flatten(1)

    return product
