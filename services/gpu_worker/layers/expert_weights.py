"""The weights of a layer's experts, and where checkpoints have them."""

from dataclasses import dataclass

from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import WeightTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of all experts of a layer, in the dtype of the model."""

    gate_up: Tensor  # [experts, 2 * inner, hidden], the gate first
    down: Tensor  # [experts, hidden, inner]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, hidden]


def separate_experts(
    table: WeightTable,
    prefix: str,
    num_experts: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertWeights:
    """Weights that the checkpoint has one by one: `prefix`.0.gate_proj.weight and so on."""
    gate_up = table.empty(num_experts, 2 * inner, hidden)
    down = table.empty(num_experts, hidden, inner)
    gate_name, up_name, down_name = names
    for expert in range(num_experts):
        table.place(f"{prefix}.{expert}.{gate_name}.weight", gate_up[expert, :inner], (inner, hidden))
        table.place(f"{prefix}.{expert}.{up_name}.weight", gate_up[expert, inner:], (inner, hidden))
        table.place(f"{prefix}.{expert}.{down_name}.weight", down[expert], (hidden, inner))
    return ExpertWeights(gate_up=gate_up, down=down)


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
    weights = ExpertWeights(
        gate_up=table.empty(num_experts, 2 * inner, hidden), down=table.empty(num_experts, hidden, inner)
    )
    for name, target in ((gate_up_name, weights.gate_up), (down_name, weights.down)):
        if transposed:
            table.place(name, target, tuple(target.mT.shape), _transpose)
        else:
            table.place(name, target, tuple(target.shape))
    return weights


def _transpose(stored: Tensor) -> Tensor:
    return stored.mT
