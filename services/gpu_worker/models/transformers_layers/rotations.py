"""Rotary embedding of transformers' classes: `apply_rotary_pos_emb` of two halves of a head, as one kernel."""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

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
