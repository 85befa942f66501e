"""The matrices that make each head's K and V of a latent, as one matrix of the checkpoint (`kv_b_proj`)."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import LinearLayers, make_spec
from blockyard.services.gpu_worker.loading.linear_spec import Rows, Split, part
from blockyard.services.gpu_worker.step import AdaptedHeads


class AdaptedUpProjection(AdaptedHeads, Protocol):
    """The products of adapters for one layer."""

    @property
    def is_active(self) -> bool:
        """Whether a row of this step has an adapter."""


class UpProjection:
    """The weight [heads, plain + value, latent]. The attention backend decides where it is applied."""

    def __init__(
        self, layers: LinearLayers, name: str, num_heads: int, plain_dim: int, value_dim: int, latent_dim: int
    ) -> None:
        up = part(name, Rows(num_heads * (plain_dim + value_dim), num_heads))
        self.spec, self.plain_dim = make_spec([up], latent_dim, split=Split.OUTPUTS), plain_dim
        matrix = layers.plain(up, latent_dim, split=Split.OUTPUTS)
        self.weight = matrix.view(-1, plain_dim + value_dim, latent_dim)
        self._adapted: AdaptedUpProjection | None = None

    def adapt(self, adapted: AdaptedUpProjection) -> None:
        """Adds the products of adapters, in steps in which it is active."""
        self._adapted = adapted

    @property
    def adapted(self) -> AdaptedHeads | None:
        """What adds to this step; None: no row of it has an adapter."""
        return self._adapted if self._adapted is not None and self._adapted.is_active else None

    def product(self, latents: Tensor) -> Tensor:
        """latents [rows, latent] -> [rows, heads * (plain + value)]: K and V."""
        return F.linear(latents, self.weight.flatten(0, 1))
