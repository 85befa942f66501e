"""MLPs with a gate of transformers' classes: one product of gate and up, and one kernel for activation and product."""

from typing import Any

import torch
from torch import Tensor, nn

from blockyard.services.gpu_worker.layers.activations import ACTIVATIONS
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
JOINED = "gate_up_proj"  # gate and up as one linear layer


def find_activation(module: nn.Module) -> str | None:
    """The key in `ACTIVATIONS` for which a module computes down(activation(gate(x)) * up(x)), or None.

    gate and up may be one linear layer, with the rows of gate first.
    """
    first = (JOINED,) if JOINED in module._modules else (GATE, UP)
    linears = [one for name in (*first, DOWN) if isinstance(one := module._modules.get(name), nn.Linear)]
    if len(linears) <= len(first) or any(type(one) is not nn.Linear for one in linears) or module._parameters:
        return None
    down, inner = linears[-1], 2 * linears[-1].in_features // len(first)
    if any((one.in_features, one.out_features) != (down.out_features, inner) for one in linears[:-1]):
        return None
    if len({one.bias is None for one in linears}) > 1 or not is_plain(module, num_arguments=1):
        return None
    for activation in ACTIVATIONS:
        if holds(lambda numbers, name=activation: _is_gated_by(name, module, first, numbers)):  # type: ignore[misc]
            return activation
    return None


def _is_gated_by(activation: str, module: nn.Module, first: tuple[str, ...], numbers: Numbers) -> bool:
    down = module.get_submodule(DOWN)
    assert isinstance(down, nn.Linear)
    x = numbers(1, 3, down.out_features)
    # small numbers tell activations apart, large ones limits of them
    g, u = (numbers(1, 3, down.in_features) * numbers(1, 3, 1, scale=10) for _ in range(2))
    given = [_Given(one) for one in ((g, u) if len(first) > 1 else (torch.cat((g, u), -1),))]
    passed = _Passed()
    probe = copy_module(module)
    probe._modules.update(zip((*first, DOWN), (*given, passed), strict=True))
    out = probe(x)
    got_x = all(len(one.inputs) == 1 and one.inputs[0] is x for one in given)
    return got_x and len(passed.inputs) == 1 and agree(out, ACTIVATIONS[activation](g.clone()) * u)


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

    def __init__(self, mlp: GatedMLP) -> None:
        super().__init__()
        self._mlp = mlp
        self.behind: SumNorm | None = None  # of the norm behind the sum with the output

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        """Takes one tensor [..., hidden], under the name that the class in transformers has for it."""
        x: Tensor = next(iter((*args, *kwargs.values())))
        out = self._mlp.apply(x.reshape(-1, x.shape[-1])).view(x.shape)
        return out if self.behind is None else SublayerOutput.of(out, self.behind)
