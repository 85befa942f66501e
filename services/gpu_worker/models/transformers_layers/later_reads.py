"""Finds rotations that may be in place: no operation reads the old q and k after them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockyard.services.gpu_worker.models.transformers_layers.rotations import Rotate


class LaterReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds reads of q and k after their rotation, in a forward pass on the meta device inside `with`.

    There the rotations return other tensors. Any operation on the old ones is a read, also by a view of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = set[str]()  # attention modules with such a read, by name
        self.rotated = set[str]()  # attention modules that could rotate in place
        self._watched: dict[int, list[tuple[str, Tensor]]] = {}  # by storage: a module, and the elements of q and k
        self._kept: list[Tensor] = []  # so that no other tensor takes the storage of q or k

    def rotate_of(self, module_name: str) -> Rotate:
        """A rotation for one attention module."""
        return partial(self._rotate, module_name)

    def _rotate(
        self, name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        rotated = torch.empty_like(q), torch.empty_like(k)
        if in_place:
            self.rotated.add(name)
            elements = _elements(q).int() + _elements(k).int()
            if int(elements.sum()) != q.numel() + k.numel() or int(elements.max()) > 1:
                self.found.add(name)  # q and k overlap, or have elements twice
            self._watched.setdefault(_storage(q), []).append((name, elements.bool()))
            self._kept.append(q)
        return rotated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.is_meta:
                for name, elements in self._watched.get(_storage(x), ()):
                    if bool((elements & _elements(x)).any()):
                        self.found.add(name)
        return func(*args, **(kwargs or {}))


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _elements(x: Tensor) -> Tensor:
    """Which elements of its storage a tensor has: [elements of the storage] bool, on the CPU."""
    size = x.untyped_storage().nbytes() // x.element_size()
    found = torch.zeros(size, dtype=torch.bool, device="cpu")
    found[torch.arange(size, device="cpu").as_strided(x.shape, x.stride(), x.storage_offset())] = True
    return found
