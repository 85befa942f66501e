"""The check of a tensor before a host function launches a kernel that reads or writes it."""

import torch
from torch import Tensor


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless a tensor is contiguous, has this shape and has one of these dtypes."""
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        wanted = f"{list(shape)} of {', '.join(map(str, dtypes))}"
        raise ValueError(f"{name}: expected contiguous {wanted}, got {list(tensor.shape)} of {tensor.dtype}")
