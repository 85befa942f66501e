"""MLPs with a gate of transformers' classes: one product of gate and up, and one kernel for activation and product."""

from typing import Any

from torch import Tensor, nn

from blockyard.services.gpu_worker.layers.activations import ACTIVATIONS
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.models.transformers_layers.probes import (
    Numbers,
    agree,
    copy_module,
    holds,
    is_plain,
)
from blockyard.services.gpu_worker.models.transformers_layers.residual_sums import SublayerOutput, SumNorm

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


def find_activation(module: nn.Module) -> str | None:
    """The key in `ACTIVATIONS` for which a module computes down(activation(gate(x)) * up(x)), or None.

    gate and up are assumed to have the same input features.
    """
    linears = [module._modules.get(name) for name in (GATE, UP, DOWN)]
    if any(type(one) is not nn.Linear for one in linears) or not is_plain(module, num_arguments=1):
        return None
    gate, up, down = (one for one in linears if isinstance(one, nn.Linear))
    fits = gate.in_features == up.in_features == down.out_features
    if not fits or not gate.out_features == up.out_features == down.in_features or module._parameters:
        return None
    if len({one.bias is None for one in (gate, up, down)}) > 1:
        return None
    for activation in ACTIVATIONS:
        if holds(lambda numbers, name=activation: _is_gated_by(name, module, gate, numbers)):  # type: ignore[misc]
            return activation
    return None


def _is_gated_by(activation: str, module: nn.Module, gate: nn.Linear, numbers: Numbers) -> bool:
    x = numbers(1, 3, gate.in_features)
    # small numbers tell activations apart, large ones limits of them
    g, u = (numbers(1, 3, gate.out_features) * numbers(1, 3, 1, scale=10) for _ in range(2))
    stand_ins = _Given(g), _Given(u), _Passed()
    probe = copy_module(module)
    probe._modules.update(zip((GATE, UP, DOWN), stand_ins, strict=True))
    out = probe(x)
    got_x = all(len(one.inputs) == 1 and one.inputs[0] is x for one in stand_ins[:2])
    return got_x and len(stand_ins[2].inputs) == 1 and agree(out, ACTIVATIONS[activation](g.clone()) * u)


class _Given(nn.Module):
    """Stands in for a linear layer with this output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self._output = output

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self._output.clone()


class _Passed(nn.Module):
    """Stands in for a linear layer, and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return x


class GatedModule(nn.Module):
    """A gated MLP of ours in the place of transformers'."""

    def __init__(self, mlp: GatedMLP, ops: FusedOps) -> None:
        super().__init__()
        self._mlp, self._ops = mlp, ops
        self.behind: SumNorm | None = None  # of the norm behind the sum with the output

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        """Takes one tensor [..., hidden], under the name that the class in transformers has for it."""
        x: Tensor = next(iter((*args, *kwargs.values())))
        out = self._mlp.apply(self._ops, x.reshape(-1, x.shape[-1])).view(x.shape)
        return out if self.behind is None else SublayerOutput.of(out, self.behind)
