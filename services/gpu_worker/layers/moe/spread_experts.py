"""Experts that are spread over replicas: rows of all replicas reach the ranks that have their experts.

Two ways, as in DeepSpeed-MoE and vLLM. Either all rows are gathered, each rank computes its experts of all of them, and
a reduce-scatter sums; or each row is sent to the ranks that have one of its experts, and their sums are sent back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe.expert_matrices import ExpertMatrix
from blockyard.services.gpu_worker.layers.moe.expert_places import ExpertPlaces
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts, ExpertWeights
from blockyard.services.gpu_worker.quantization.method import ExpertLinear

NOBODY = -1  # the expert of a row of padding: on no rank


class RoutedRows(NamedTuple):
    """Rows with the experts that a router has chosen for them."""

    x: Tensor  # [rows, hidden]
    experts: Tensor  # [rows, top_k] int32
    weights: Tensor  # [rows, top_k] float32

    def packed(self) -> Tensor:
        """Returns [rows, bytes] uint8, of which zeros are rows of padding."""
        return torch.cat([_row_bytes(one) for one in (self.x, self.experts - NOBODY, self.weights)], 1)


class SpreadExperts:
    """Implements `ExpertProducts` over those of this rank's own experts."""

    def __init__(self, products: ExpertProducts, weights: ExpertWeights, routing: Routing) -> None:
        assert weights.exchange is not None and weights.places is not None
        self._products, self._exchange, self._top_k = products, weights.exchange, routing.top_k
        self._owners, self._owner_table = self._exchange.owners, weights.places.owner_table
        self._hidden, self._dtype, self._device = weights.gate_up.shape[0], weights.gate_up.dtype, weights.device
        self._exchange.add(self)

    def linears(self) -> list[Linear]:
        return self._products.linears()

    def matrices(self) -> list[ExpertMatrix]:
        return self._products.matrices()

    def tensors(self) -> list[Tensor]:
        return self._products.tensors()

    @property
    def places(self) -> ExpertPlaces | None:
        return self._products.places

    def weights_at(self, place: int) -> list[ExpertLinear]:
        return self._products.weights_at(place)

    def numbers(self) -> list[Tensor]:
        return self._products.numbers()

    def choose(self, logits: Tensor, bias: Tensor | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._products.choose(logits, bias, factors)

    def fuses_norm(self, rows: int) -> bool:
        return False

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        batch_invariant: bool = False,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """The last two are None: other ranks' sums come first."""
        assert residual is None and norm is None
        total = self._sum(RoutedRows(x, experts.int(), weights.float()), batch_invariant)
        return total if shared is None else total.add_(shared)

    def serve(self) -> None:
        """Implements `ServingLayer`."""
        none = torch.empty(0, self._top_k, dtype=torch.int32, device=self._device)
        self._sum(RoutedRows(torch.empty(0, self._hidden, dtype=self._dtype, device=self._device), none, none.float()))

    def _sum(self, rows: RoutedRows, batch_invariant: bool = False) -> Tensor:
        """Returns the sum of each row's experts, in a new tensor."""
        if self._exchange.sends_rows(self._top_k):
            return self._sum_sent(rows, batch_invariant)
        return self._sum_gathered(rows, batch_invariant)

    def _sum_gathered(self, rows: RoutedRows, batch_invariant: bool) -> Tensor:
        """All replicas have as many rows, with padding."""
        group, num, packed = self._exchange.group, len(rows.x), rows.packed()
        most = num if self._exchange.num_rows is None else self._exchange.num_rows
        assert num <= most
        if num < most:
            packed = torch.cat((packed, packed.new_zeros(most - num, packed.shape[1])))
        sums = self._compute(group.gather(packed).flatten(0, 1), batch_invariant)
        return group.sum_own(sums.view(group.size, most, self._hidden))[:num]

    def _sum_sent(self, rows: RoutedRows, batch_invariant: bool) -> Tensor:
        """The host learns how many rows go where."""
        group, packed = self._exchange.group, rows.packed()
        owners = self._owner_table[rows.experts]
        places = [(owners == one).any(1).nonzero().flatten() for one in self._owners]
        sent = [len(one) for one in places]
        all_sent = group.gather(torch.tensor(sent, dtype=torch.int64, device=packed.device)).tolist()
        received = [one[group.rank] for one in all_sent]
        arrived = group.exchange_rows(packed[torch.cat(places)], sent, received)
        back = group.exchange_rows(self._compute(arrived, batch_invariant), received, sent)
        total = torch.zeros_like(rows.x)
        for own, sums in zip(places, torch.split(back, sent), strict=True):
            total.index_add_(0, own, sums)
        return total

    def _compute(self, packed: Tensor, batch_invariant: bool) -> Tensor:
        """Returns the sums of this rank's experts, [rows, hidden]."""
        if not len(packed):
            return torch.empty(0, self._hidden, dtype=self._dtype, device=self._device)
        choice = self._top_k * torch.int32.itemsize
        x, experts, weights = (
            part.contiguous().view(dtype)
            for part, dtype in zip(
                torch.split(packed, [packed.shape[1] - 2 * choice, choice, choice], 1),
                (self._dtype, torch.int32, torch.float32),
                strict=True,
            )
        )
        total = self._products.forward(x, experts + NOBODY, weights, None, batch_invariant)
        assert total is not None  # it is added to nothing but a residual
        return total


def _row_bytes(tensor: Tensor) -> Tensor:
    """A view of [rows, size] as bytes, or a copy."""
    # flat first: torch views no dimension of size 1, or of no rows, in another dtype
    return tensor.flatten().view(torch.uint8).view(len(tensor), tensor.shape[1] * tensor.itemsize)
