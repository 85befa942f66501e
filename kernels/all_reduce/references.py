"""What sums over ranks compute, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_ranks_reference(parts: Sequence[Tensor]) -> Tensor:
    """Adds equal shapes in their order in float32, and rounds once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def sum_add_rms_norm_reference(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns residual + sum, and its RMSNorm. parts and residual: [rows, size]."""
    total = (residual.float() + sum_ranks_reference(parts).float()).to(residual.dtype)
    x = total.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    return total, normed.to(residual.dtype)
