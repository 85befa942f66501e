"""A product of parts in different forms: one product for each run of parts with equal forms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockyard.services.gpu_worker.quantization.method import Fusion, LinearMethod


class CutLinear:
    """Implements `LinearMethod`: outputs of several products side by side."""

    form = None
    fusions = frozenset[Fusion]()

    def __init__(self, methods: Sequence[LinearMethod]) -> None:
        self.methods = methods
        self.shape = methods[0].shape[0], sum(one.shape[1] for one in methods)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.methods)

    def prepare(self) -> None:
        for one in self.methods:
            one.prepare()

    def apply(self, x: Tensor) -> Tensor:
        return torch.cat([one.apply(x) for one in self.methods], -1)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": own for i, one in enumerate(self.methods) for name, own in one.tensors().items()}

    def replace(self, name: str, tensor: Tensor) -> None:
        number, _, own = name.partition(".")
        self.methods[int(number)].replace(own, tensor)
