"""The weights of a layer's experts, and where checkpoints have them.

`ExpertMethod` is to the experts of a layer what `LinearMethod` is to one linear layer: the storage format of a weight.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.linear_method import DenseWeight, LinearMethod, UnquantizedLinear
from blockyard.services.gpu_worker.loading import mxfp4
from blockyard.services.gpu_worker.loading.expert_loads import LayerLoad
from blockyard.services.gpu_worker.loading.weights import WeightTable


class ExpertMethod(Protocol):
    """The weight of one product of all experts of a layer: a `LinearMethod` with a leading dimension of experts."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of input and output features."""

    def linear(self, expert: int) -> LinearMethod:
        """Returns the weight of one expert, for devices that multiply expert by expert."""

    def tensors(self) -> list[Tensor]:
        """All tensors of the weight."""

    def grouped_weight(self) -> DenseWeight:
        """Returns weight [experts, out, in] and bias [experts, out] as the kernels of `kernels.moe` read them."""


@dataclass(frozen=True, slots=True)
class UnquantizedExperts:
    """Implements `ExpertMethod` for weights in the dtype of the model."""

    weight: Tensor  # [experts, out, in]
    bias: Tensor | None = None  # [experts, out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[2], self.weight.shape[1]

    def linear(self, expert: int) -> LinearMethod:
        return UnquantizedLinear(self.weight[expert], None if self.bias is None else self.bias[expert])

    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def grouped_weight(self) -> DenseWeight:
        return DenseWeight(self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of all experts of a layer."""

    gate_up: ExpertMethod  # hidden -> 2 * inner, the gate first
    down: ExpertMethod  # inner -> hidden
    device: torch.device  # that multiplies
    load: LayerLoad | None = None  # counts how often each expert is chosen


class ExpertProducts(Protocol):
    """The products of the experts on one type of device."""

    def linears(self) -> list[Linear]:
        """The matrices that are linear layers of their own."""

    def tensors(self) -> list[Tensor]:
        """All tensors of the weights."""

    def choose(self, logits: Tensor, bias: Tensor | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chooses experts: see `choose_experts`."""

    def fuses_norm(self, rows: int) -> bool:
        """Whether `forward` of so many rows can normalise x as it is read."""

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        batch_invariant: bool = False,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor | None:
        """x [rows, hidden], experts and weights [rows, top_k] -> the sum of each row's experts and `shared`.

        batch_invariant: a row has the same bits whatever the number of rows. residual [rows, hidden]: the sum may be
        added to it in place, and then None is returned; or the addends are, [rows, top_k, hidden]. norm: of x, only if
        `fuses_norm`.
        """


def separate_experts(
    table: WeightTable,
    prefix: str,
    num_experts: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertWeights:
    """Weights that the checkpoint has one by one: `prefix`.0.gate_proj.weight and so on."""
    gate_up, down = _stacks(table, num_experts, hidden, inner)
    gate_name, up_name, down_name = names
    for expert in range(num_experts):
        table.place(f"{prefix}.{expert}.{gate_name}.weight", gate_up[expert, :inner], (inner, hidden))
        table.place(f"{prefix}.{expert}.{up_name}.weight", gate_up[expert, inner:], (inner, hidden))
        table.place(f"{prefix}.{expert}.{down_name}.weight", down[expert], (hidden, inner))
    return _unquantized(table, gate_up, down)


def stacked_experts(
    table: WeightTable,
    gate_up_name: str,
    down_name: str,
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    transposed: bool = False,
) -> ExpertWeights:
    """Weights of which the checkpoint has two: [experts, 2 * inner, hidden] and [experts, hidden, inner].

    transposed: the checkpoint has them as [experts, hidden, 2 * inner] and [experts, inner, hidden].
    """
    gate_up, down = _stacks(table, num_experts, hidden, inner)
    for name, target in ((gate_up_name, gate_up), (down_name, down)):
        if transposed:
            table.place(name, target, tuple(target.mT.shape), _transpose)
        else:
            table.place(name, target, tuple(target.shape))
    return _unquantized(table, gate_up, down)


def _transpose(stored: Tensor) -> Tensor:
    return stored.mT


def transposed_experts(
    table: WeightTable, prefix: str, num_experts: int, hidden: int, inner: int, *, is_mxfp4: bool
) -> ExpertWeights:
    """Stacks with biases, in which gate and up are side by side, one output of each after the other (gpt-oss).

    The checkpoint has `prefix`.gate_up_proj as [experts, hidden, 2 * inner] and `prefix`.down_proj as
    [experts, inner, hidden]; or as is_mxfp4 their transposes in that format.
    """
    gate_up, down = _stacks(table, num_experts, hidden, inner)
    gate_up_bias, down_bias = table.empty(num_experts, 2 * inner), table.empty(num_experts, hidden)
    pairs, bias_pairs = gate_up.view(num_experts, 2, inner, hidden), gate_up_bias.view(num_experts, 2, inner)
    gate_up_name, down_name = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    if is_mxfp4:
        mxfp4.place(table, gate_up_name, pairs, _split_pairs)
        mxfp4.place(table, down_name, down, lambda rows: rows)
    else:
        stored = (num_experts, hidden, 2 * inner)
        table.place(gate_up_name, pairs, stored, lambda stacks: _split_pairs(stacks.transpose(1, 2)))
        table.place(down_name, down, (num_experts, inner, hidden), lambda stacks: stacks.transpose(1, 2))
    table.place(f"{gate_up_name}_bias", bias_pairs, (num_experts, 2 * inner), _split_pairs)
    table.place(f"{down_name}_bias", down_bias, (num_experts, hidden))
    return _unquantized(table, gate_up, down, gate_up_bias, down_bias)


def _stacks(table: WeightTable, num_experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    """Memory of both products."""
    return table.experts(num_experts, 2 * inner, hidden), table.experts(num_experts, hidden, inner)


def _unquantized(
    table: WeightTable,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> ExpertWeights:
    return ExpertWeights(
        gate_up=UnquantizedExperts(gate_up, gate_up_bias),
        down=UnquantizedExperts(down, down_bias),
        device=table.device,
        load=table.expert_load(len(gate_up)),
    )


def _split_pairs(rows: Tensor) -> Tensor:
    """[experts, 2 * inner, ...], gate and up in turn -> [experts, 2, inner, ...], a view."""
    return rows.view(len(rows), -1, 2, *rows.shape[2:]).transpose(1, 2)
