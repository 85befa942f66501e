"""Finds the modules of a transformers class that our kernels can compute, by their names."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from blockyard.services.gpu_worker.models.transformers_layers.gates import GATE, JOINED, UP, find_activation
from blockyard.services.gpu_worker.models.transformers_layers.joint_products import find_joint, shared_parameters
from blockyard.services.gpu_worker.models.transformers_layers.module_calls import ForwardCalls
from blockyard.services.gpu_worker.models.transformers_layers.norms import NormKind, find_norm
from blockyard.services.gpu_worker.models.transformers_layers.residual_sums import find_sums
from blockyard.services.gpu_worker.models.transformers_layers.rotations import rotates_halves


@dataclass(frozen=True, slots=True)
class Fusions:
    """The modules of a model that are replaced, all by name."""

    joint: tuple[tuple[str, ...], ...] = ()  # linear layers with the same input, in the order of their calls
    norms: Mapping[str, NormKind] = field(default_factory=dict)
    gates: Mapping[str, str] = field(default_factory=dict)  # MLPs, and the keys of their activations in `ACTIVATIONS`
    rotations: Mapping[str, bool] = field(default_factory=dict)  # attentions, and whether they may rotate in place
    sums: Mapping[str, str] = field(default_factory=dict)  # linear layers, and the norms behind sums of their outputs


def find_fusions(causal: nn.Module, calls: ForwardCalls) -> Fusions:
    """Looks at all modules of a class on the meta device. calls: of a forward pass.

    Rotations are taken for in place; `LaterReads` says whether they can be.
    """
    places = Counter(id(module) for _, module in causal.named_modules(remove_duplicate=False))
    shared, joint = shared_parameters(causal), find_joint(causal, calls.linears)
    norms, gates, rotations = dict[str, NormKind](), dict[str, str](), dict[str, bool]()
    for name, module in causal.named_modules():
        if not name or places[id(module)] > 1:
            continue
        kind = find_norm(module)
        if kind is not None and id(module.weight) not in shared:
            norms[name] = kind
        elif JOINED in module._modules or {f"{name}.{GATE}", f"{name}.{UP}"} in [set(group) for group in joint]:
            activation = find_activation(module)
            if activation is not None and shared.isdisjoint(map(id, module.parameters())):
                gates[name] = activation
        elif rotates_halves(module):
            rotations[name] = True
    return Fusions(tuple(joint), norms, gates, rotations, find_sums(calls, norms))
