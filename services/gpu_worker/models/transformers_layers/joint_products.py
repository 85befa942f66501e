"""Linear layers of transformers' classes as ours, those with the same input as one matrix product."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from blockyard.services.gpu_worker.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class LinearCall:
    """A call of a linear layer in a forward pass."""

    name: str  # of the layer in the model
    layer: nn.Linear
    x: Tensor  # kept, so that no other tensor takes its identity
    version: int  # how often x was written to in place


@contextmanager
def recorded_calls(causal: nn.Module) -> Iterator[list[LinearCall]]:
    """Records the calls of all linear layers in a forward pass with grad mode off, not in inference mode."""
    calls: list[LinearCall] = []

    def record(name: str, layer: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (x,) = (*args, *kwargs.values())
        calls.append(LinearCall(name, layer, x, x._version))

    hooks = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def find_joint(causal: nn.Module, calls: Sequence[LinearCall]) -> list[tuple[str, ...]]:
    """The names of linear layers that one product can compute, in the order of their calls.

    They have the same parent, multiply the very same tensor, once each, and all or none of them has a bias.
    """
    times, shared = Counter(call.name for call in calls), _shared_parameters(causal)
    groups: dict[tuple[str, int, int], list[LinearCall]] = {}
    for call in calls:
        known = type(call.layer) is nn.Linear and times[call.name] == 1 and id(call.layer.weight) not in shared
        if known:
            groups.setdefault((call.name.rpartition(".")[0], id(call.x), call.version), []).append(call)
    return [
        tuple(call.name for call in group)
        for group in groups.values()
        if len(group) > 1 and len({call.layer.bias is None for call in group}) == 1
    ]


def _shared_parameters(causal: nn.Module) -> set[int]:
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


class LinearModule(nn.Module):
    """A linear layer of ours in the place of transformers'."""

    def __init__(self, linear: Linear, replaced: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self._linear = linear

    def forward(self, input: Tensor) -> Tensor:
        return self._linear(input.reshape(-1, self.in_features)).view(*input.shape[:-1], self.out_features)


class JointModule(nn.Module):
    """A part of a joint product in the place of a linear layer of transformers."""

    def __init__(self, product: JointProduct, part: int, replaced: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self._product, self._part = product, part

    def forward(self, input: Tensor) -> Tensor:
        return self._product.take(self._part, input)
