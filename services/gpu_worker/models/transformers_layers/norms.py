"""RMSNorm of transformers' classes, computed by one kernel."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps
from blockyard.services.gpu_worker.models.transformers_layers.probes import (
    Numbers,
    agree,
    copy_module,
    holds,
    is_plain,
)
from blockyard.services.gpu_worker.models.transformers_layers.residual_sums import SumNorm

EPS_NAMES = ("variance_epsilon", "eps")


@dataclass(frozen=True, slots=True)
class NormKind:
    """The arguments of `make_rms_norm`."""

    size: int
    eps: float
    unit_offset: bool


def find_norm(module: nn.Module) -> NormKind | None:
    """The RMSNorm that a module computes, or None if it computes anything else."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or len(module._parameters) != 1 or not is_plain(module, num_arguments=1):
        return None
    eps = next((found for name in EPS_NAMES if (found := getattr(module, name, None)) is not None), None)
    if module._modules or module._buffers or not isinstance(eps, float) or eps <= 0:
        return None
    for unit_offset in (False, True):
        kind = NormKind(len(weight), eps, unit_offset)
        if holds(lambda numbers, kind=kind: _is_of(kind, module, numbers)):  # type: ignore[misc]
            return kind
    return None


def _is_of(kind: NormKind, module: nn.Module, numbers: Numbers) -> bool:
    theirs, weight = copy_module(module), numbers(kind.size)
    theirs._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    ours = RMSNorm(weight.float() + 1.0 if kind.unit_offset else weight, kind.eps)
    for scale in (1.0, 30.0, math.sqrt(kind.eps)):  # the last tells which eps is added, and where
        x = numbers(1, 3, kind.size, scale=scale) * numbers(1, 3, 1)
        before = x.clone()
        if not agree(theirs(x), ours(before)) or not x.equal(before):
            return False
    return True


class NormModule(nn.Module):
    """An RMSNorm of ours in the place of transformers'."""

    def __init__(self, norm: RMSNorm, size: int, ops: FusedOps) -> None:
        super().__init__()
        self._norm, self._size, self._ops = norm, size, ops
        self.sums = SumNorm(norm, ops)

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        """Takes one tensor [..., size], under the name that the class in transformers has for it."""
        x: Tensor = next(iter((*args, *kwargs.values())))
        normed = self.sums.take(x)
        if normed is not None:
            return normed
        if self._norm.weight.dtype not in (x.dtype, torch.float32) or x.stride(-1) != 1:
            return self._norm(x)
        if x.dim() == 3 and (x.is_contiguous() or x.shape[0] == 1):
            return self._ops.add_norm(x.view(-1, self._size), None, self._norm).view(x.shape)
        if x.dim() != 4 or x.shape[0] != 1:
            return self._norm(x)
        # for --batch-invariant, one token takes the same kernel, although its heads may be contiguous
        if x.stride(1) < x.stride(2):  # [1, heads, tokens, head_dim] of a token's heads side by side
            return self._ops.norm_heads(x[0].transpose(0, 1), self._norm).transpose(0, 1)[None]
        return self._ops.norm_heads(x[0], self._norm)[None]
