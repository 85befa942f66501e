"""Sums of the residual and the output of a sublayer, which one kernel computes together with the norm behind them.

The sums are transformers' own code: `residual + hidden_states`. So the last linear layer of a sublayer returns a
`SublayerOutput`, a tensor that notices when it is added. The norm then has its result before it is called.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps
from blockyard.services.gpu_worker.models.transformers_layers.module_calls import ADDITIONS, ForwardCalls


def find_sums(calls: ForwardCalls, norms: Collection[str]) -> dict[str, str]:
    """Returns each linear layer with an output that is added to a tensor, with the norm behind the sum, by name."""
    times = Counter(call.name for call in (*calls.linears, *calls.others))
    outputs = {id(call.output): call.name for call in calls.linears if times[call.name] == 1}
    sums = {
        id(total): names[0]
        for left, right, total in calls.additions
        if len(names := [outputs[id(one)] for one in (left, right) if id(one) in outputs]) == 1
    }
    found: dict[str, str] = {}
    for call in calls.others:  # of two norms of one sum, the first
        if call.name in norms and times[call.name] == 1 and call.version == 0 and id(call.x) in sums:
            found.setdefault(sums[id(call.x)], call.name)
    return found


class SumNorm:
    """A norm that may be computed with the sum before it. Holds the result until the norm is called."""

    def __init__(self, norm: RMSNorm, ops: FusedOps) -> None:
        self._norm, self._ops = norm, ops
        self._total: Tensor | None = None
        self._normed: Tensor | None = None

    def add(self, residual: Tensor, delta: Tensor) -> Tensor:
        """residual and delta [..., size] -> their sum, in a new tensor."""
        fits = residual.shape == delta.shape and residual.dtype == delta.dtype
        fits = fits and self._norm.weight.dtype in (residual.dtype, torch.float32)
        if not (fits and residual.is_contiguous() and delta.is_contiguous()):
            return residual + delta
        size = residual.shape[-1]
        total, normed = self._ops.sum_norm(residual.view(-1, size), delta.view(-1, size), self._norm)
        self._total, self._normed = total.view(residual.shape), normed.view(residual.shape)
        return self._total

    def take(self, x: Tensor) -> Tensor | None:
        """The norm of x, if x is the last sum."""
        normed = self._normed if x is self._total else None
        self.forget()
        return normed

    def forget(self) -> None:
        self._total = self._normed = None


class SublayerOutput(Tensor):
    """The output of a sublayer. For everything but its sum with another tensor it is a plain tensor."""

    behind: SumNorm

    @classmethod
    def of(cls, x: Tensor, behind: SumNorm) -> Tensor:
        made = x.as_subclass(cls)
        made.behind = behind
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in ADDITIONS and not kwargs and len(args) == 2:
                left, right = args
                if isinstance(right, cls) and type(left) is Tensor:
                    return right.behind.add(left, right.as_subclass(Tensor))
                if isinstance(left, cls) and type(right) is Tensor:
                    return left.behind.add(right, left.as_subclass(Tensor))
            return func(*args, **(kwargs or {}))
