"""Our linear layers in transformers' classes. Layers with the same input are one matrix product."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.models.transformers_layers.module_calls import ModuleCall
from blockyard.services.gpu_worker.models.transformers_layers.residual_sums import SublayerOutput, SumNorm


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and nothing else: some routers are subclasses with a forward of their own."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def find_joint(causal: nn.Module, calls: Sequence[ModuleCall]) -> list[tuple[str, ...]]:
    """The names of linear layers that one product can compute, in the order of their calls.

    They have the same parent, multiply the very same tensor, once each, and all or none of them has a bias.
    """
    times, shared = Counter(call.name for call in calls), shared_parameters(causal)
    groups: dict[tuple[str, int, int], list[str]] = {}
    has_bias: dict[str, bool] = {}
    for call in calls:
        layer = causal.get_submodule(call.name)
        if type(layer) is nn.Linear and times[call.name] == 1 and id(layer.weight) not in shared:
            groups.setdefault((call.name.rpartition(".")[0], id(call.x), call.version), []).append(call.name)
            has_bias[call.name] = layer.bias is not None
    return [
        tuple(names) for names in groups.values() if len(names) > 1 and len({has_bias[name] for name in names}) == 1
    ]


def shared_parameters(causal: nn.Module) -> set[int]:
    """Identities of parameters that are in two places, such as the table of an embedding and the head."""
    places = Counter(id(parameter) for _, parameter in causal.named_parameters(remove_duplicate=False))
    return {one for one, count in places.items() if count > 1}


class JointProduct:
    """One matrix product in the place of several. Holds its output until each part of it was taken."""

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        """sizes: output features of the parts, in the order of `linear`."""
        self.linear = linear
        self._parts = list(pairwise((0, *accumulate(sizes))))
        self._missing = set[int]()  # parts that were not taken yet, of the product of `_input`
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._storage: StorageWeakRef | None = None  # of the last output

    def take(self, part: int, x: Tensor) -> Tensor:
        """A part of the product of x [..., in], as a view [..., size of the part]."""
        if x is not self._input or part not in self._missing:
            self._compute(x)
        assert self._output is not None
        start, end = self._parts[part]
        found = self._output[..., start:end]
        self._missing.discard(part)
        if not self._missing:
            self.forget()
        return found

    def owns(self, x: Tensor) -> bool:
        """Whether x is a view of the last output."""
        return self._storage is not None and self._storage == _reference(x)

    def forget(self) -> None:
        """Drops the tensors of a product of which not all parts were taken."""
        self._input = self._output = None
        self._missing.clear()

    def _compute(self, x: Tensor) -> None:
        output = self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._parts[-1][1])
        self._input, self._output, self._storage = x, output, _reference(output)
        self._missing.update(range(len(self._parts)))


def _reference(x: Tensor) -> StorageWeakRef:
    """A weak reference to the storage of x. While it exists, no other storage equals it."""
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """The facts that other modules read of a linear layer's weight. There is no tensor to compute with."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size


class _Replacement(nn.Module):
    def __init__(self, replaced: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.weight = WeightFacts(replaced.weight.dtype, device, replaced.weight.shape)


class LinearModule(_Replacement):
    """A linear layer of ours in the place of transformers'."""

    def __init__(
        self, linear: Linear, replaced: nn.Linear, device: torch.device, own_inputs: range | None = None
    ) -> None:
        """own_inputs: of a rank, which gets all. None: it gets its own."""
        super().__init__(replaced, device)
        self._linear, self._own_inputs = linear, own_inputs
        self.behind: SumNorm | None = None  # of the norm behind the sum with the output

    def forward(self, input: Tensor) -> Tensor:
        if self._own_inputs is not None:
            input = input[..., self._own_inputs.start : self._own_inputs.stop]
        out = self._linear(input.reshape(-1, input.shape[-1])).view(*input.shape[:-1], -1)
        return out if self.behind is None else SublayerOutput.of(out, self.behind)


class JointModule(_Replacement):
    """A part of a joint product in the place of a linear layer of transformers."""

    def __init__(self, product: JointProduct, part: int, replaced: nn.Linear, device: torch.device) -> None:
        super().__init__(replaced, device)
        self._product, self._part = product, part

    def forward(self, input: Tensor) -> Tensor:
        return self._product.take(self._part, input)
