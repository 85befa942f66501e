"""Records the module calls of a transformers class's forward pass, to find calls that can be computed together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ADDITIONS: tuple[Callable[..., Any], ...] = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    name: str  # of the module in the model
    x: Tensor
    version: int  # how often x was written to in place
    output: Tensor


@dataclass(frozen=True, slots=True)
class ForwardCalls:
    """Calls of modules without children, and sums. All tensors are kept, so that no others take their identities."""

    linears: list[ModuleCall] = field(default_factory=list)
    others: list[ModuleCall] = field(default_factory=list)
    additions: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # two tensors of a shape, their sum


@contextmanager
def recorded_calls(causal: nn.Module) -> Iterator[ForwardCalls]:
    """Records a forward pass with grad mode off, but not in inference mode, where tensors have no versions."""
    calls = ForwardCalls()

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = (*args, *kwargs.values())
        if len(given) == 1 and isinstance(given[0], Tensor) and isinstance(out, Tensor):
            call = ModuleCall(name, given[0], given[0]._version, out)
            (calls.linears if isinstance(module, nn.Linear) else calls.others).append(call)

    hooks = [
        module.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, module in causal.named_modules()
        if not module._modules
    ]
    try:
        with _Additions(calls):
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


class _Additions(TorchFunctionMode):
    def __init__(self, calls: ForwardCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ADDITIONS and not kwargs and len(args) == 2 and all(isinstance(one, Tensor) for one in args):
            left, right = args
            if left.shape == right.shape:
                self._calls.additions.append((left, right, out))
        return out
