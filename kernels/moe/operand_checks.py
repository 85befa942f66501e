"""The checks that host functions of experts' products share, before they launch a kernel."""

import torch
from torch import Tensor


def check_operands(x: Tensor, weight: Tensor, num_pairs: int, bias: Tensor | None, scale: Tensor | None) -> None:
    """weight [experts, out, in], bias [experts, out], scale of `num_pairs` float32. Raises ValueError."""
    if x.dtype != weight.dtype or (bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:2])):
        raise ValueError(f"dtypes differ, or a bias does not fit: {x.dtype}, {weight.dtype}")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != num_pairs):
        raise ValueError(f"scale must be {num_pairs} float32, got {list(scale.shape)} {scale.dtype}")
    if not all(one.is_contiguous() for one in (x, weight, bias, scale) if one is not None):
        raise ValueError("operands must be contiguous")


def check_loads(loads: Tensor | None, num_experts: int) -> None:
    """loads: where a kernel writes the number of pairs of each expert; None: nowhere. Raises ValueError."""
    if loads is not None and (loads.shape != (num_experts,) or loads.dtype != torch.int32 or not loads.is_contiguous()):
        raise ValueError(f"loads must be [{num_experts}] contiguous int32, got {list(loads.shape)} {loads.dtype}")
