"""Mixtures of experts of transformers' classes, as our products of experts.

transformers 5 gives experts one form: a module with stacked weights, `gate_up_proj` and `down_proj`, which is called
with rows, the experts that a router chose for them, and their weights. The router stays transformers' own code.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockyard.kernels.moe.gates import Gate, gated
from blockyard.kernels.moe.routing import MAX_EXPERTS, Routing
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import stacked_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import find_experts
from blockyard.services.gpu_worker.models.transformers_layers.probes import Numbers, agree, copy_module, holds
from blockyard.shared.errors import ConfigError

GATE_UP, DOWN = "gate_up_proj", "down_proj"
GATES = (Gate.SILU, Gate.GELU_TANH)
PROBE_EXPERTS, PROBE_INNER, PROBE_HIDDEN = 3, 8, 16


@dataclass(frozen=True, slots=True)
class ExpertsKind:
    routing: Routing  # only the counts: the router is transformers'
    hidden: int
    inner: int
    gate: Gate
    transposed: bool  # weights are [experts, in, out]


def are_experts(module: nn.Module) -> bool:
    """Whether a module has the form for which transformers looks up an implementation."""
    return isinstance(getattr(module, "is_concatenated", None), bool) and hasattr(module, "_apply_gate")


def find_kind(module: nn.Module, top_k: int) -> ExpertsKind:
    """top_k: experts of each row, as the router calls the module. Raises ConfigError with what ours cannot compute."""
    name, parameters = type(module).__name__, module._parameters
    if parameters.keys() != {GATE_UP, DOWN} or not module.is_concatenated:
        raise ConfigError(f"its {name} has no stacks {GATE_UP} and {DOWN} alone, with all gates first")
    down, transposed = parameters[DOWN], bool(module.is_transposed)
    assert down is not None
    num_experts, hidden, inner = down.shape if not transposed else (down.shape[0], down.shape[2], down.shape[1])
    if num_experts > MAX_EXPERTS or top_k > num_experts:
        raise ConfigError(f"its {name} has {num_experts} experts, {top_k} for each row; at most {MAX_EXPERTS} can be")
    for gate in GATES:
        if holds(lambda numbers, gate=gate: _computes(gate, module, transposed, numbers)):  # type: ignore[misc]
            routing = Routing(num_experts=num_experts, top_k=top_k)
            return ExpertsKind(routing, hidden, inner, gate, transposed)
    raise ConfigError(f"its {name} computes other experts than down(activation(gate) * up) with silu or gelu by tanh")


def _computes(gate: Gate, module: nn.Module, transposed: bool, numbers: Numbers) -> bool:
    """Whether a small copy of the module computes what ours does."""
    probe = copy_module(module)
    config: Any = copy.copy(module.config)
    config._experts_implementation_internal = "eager"
    probe.__dict__ |= {"config": config, "num_experts": PROBE_EXPERTS}
    gate_up = numbers(PROBE_EXPERTS, 2 * PROBE_INNER, PROBE_HIDDEN)
    down = numbers(PROBE_EXPERTS, PROBE_HIDDEN, PROBE_INNER)
    for name, stack in ((GATE_UP, gate_up), (DOWN, down)):
        stored = stack.mT.contiguous() if transposed else stack
        probe._parameters[name] = nn.Parameter(stored, requires_grad=False)
    for scale in (0.1, 3.0):  # small numbers tell activations apart, large ones limits of them
        x, chosen = numbers(4, PROBE_HIDDEN, scale=scale), torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]], device="cpu")
        weights = numbers(4, 2).float().abs()
        ours = [
            sum(weights[row, i] * (gated(x[row] @ gate_up[e].mT, gate) @ down[e].mT).float() for i, e in enumerate(own))
            for row, own in enumerate(chosen.tolist())
        ]
        if not agree(probe(x, chosen, weights), torch.stack(ours).to(x.dtype)):  # type: ignore[arg-type]
            return False
    return True


class ExpertsModule(nn.Module):
    """Experts of ours in the place of transformers'."""

    def __init__(self, kind: ExpertsKind, layers: LinearLayers, name: str) -> None:
        super().__init__()
        self.num_experts = kind.routing.num_experts
        sizes = (kind.routing.num_experts, kind.hidden, kind.inner)
        names = f"{name}.{GATE_UP}", f"{name}.{DOWN}"
        weights = stacked_experts(layers, *names, *sizes, transposed=kind.transposed)
        self.products = find_experts(weights, kind.routing, kind.gate, False)
        self._ranks = layers.table.ranks  # that have shares of the experts

    def linears(self) -> list[Linear]:
        return self.products.linears()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `Computes.route`."""
        chosen, weights = top_k_index.int().contiguous(), top_k_weights.float().contiguous()
        out = self.products.forward(hidden_states.contiguous(), chosen, weights, None)
        assert out is not None  # it is added to nothing
        return out if self._ranks is None else self._ranks.sum(out)
