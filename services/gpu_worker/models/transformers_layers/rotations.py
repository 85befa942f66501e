"""Rotary embedding of transformers' classes: `apply_rotary_pos_emb` of two halves of a head, as one kernel.

A rotation may be in place if no operation reads the old q and k after it, which `LaterReads` finds.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockyard.kernels.layers.apply_rope import rotate_halves_reference
from blockyard.services.gpu_worker.models.transformers_layers.joint_products import JointProduct
from blockyard.services.gpu_worker.models.transformers_layers.probes import Numbers, agree, holds, is_plain

FUNCTION = "apply_rotary_pos_emb"

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]  # as `FusedOps.rotate_halves`


def rotates_halves(module: nn.Module) -> bool:
    """Whether the forward of a module calls a function of its file that rotates q and k as ours does."""
    forward = type(module).forward
    if not is_plain(module) or not isinstance(forward, FunctionType) or FUNCTION not in forward.__code__.co_names:
        return False
    function = forward.__globals__.get(FUNCTION)
    return isinstance(function, FunctionType) and _is_ours(function)


@cache
def _is_ours(function: FunctionType) -> bool:
    return holds(lambda numbers: all(_agrees(function, numbers, rotary_dim) for rotary_dim in (16, 8)))


def _agrees(function: FunctionType, numbers: Numbers, rotary_dim: int) -> bool:
    """With fewer numbers rotated than a head has, a function may also refuse. cos and sin have no equal halves, so
    that each order of numbers gives another result."""
    given = (numbers(1, 4, 3, 16), numbers(1, 2, 3, 16), *(numbers(1, 3, rotary_dim) for _ in range(2)))
    try:
        theirs = function(*(x.clone() for x in given))
    except RuntimeError:
        return rotary_dim < given[0].shape[-1]
    ours = (rotate_halves_reference(x, *given[2:]) for x in given[:2])
    return all(agree(one, other) for one, other in zip(theirs, ours, strict=True))


class HalvesRotation:
    """Takes the place of `apply_rotary_pos_emb` for one attention module."""

    def __init__(self, original: Callable[..., Any], rotate: Rotate, products: Sequence[JointProduct]) -> None:
        """products: q and k in an output of one of these may be overwritten."""
        self._original, self._rotate, self._products = original, rotate, products

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _fits(q, k, cos, sin):
            return self._original(q, k, cos, sin, *args, **kwargs)
        in_place = any(product.owns(q) and product.owns(k) for product in self._products)
        return self._rotate(q, k, cos, sin, in_place)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if q.dim() != 4 or k.dim() != 4 or k.shape != (1, k.shape[1], *q.shape[2:]) or q.shape[0] != 1:
        return False
    of_tokens = cos.shape == sin.shape == (1, q.shape[2], cos.shape[-1]) and cos.shape[-1] % 2 == 0
    fits = of_tokens and 0 < cos.shape[-1] <= q.shape[3] and len({x.dtype for x in (q, k, cos, sin)}) == 1
    return fits and all(x.stride(-1) == 1 for x in (q, k, cos, sin))


def install(module: nn.Module, rotate: Rotate, products: Sequence[JointProduct]) -> None:
    """Makes the forward of this one module call our rotation. The library's function stays as it is.

    The module is one for which `rotates_halves` is True. products: see `HalvesRotation`.
    """
    forward = type(module).forward
    assert isinstance(forward, FunctionType)
    rotation = HalvesRotation(forward.__globals__[FUNCTION], rotate, products)
    names = {**forward.__globals__, FUNCTION: rotation}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)


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
