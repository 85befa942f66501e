"""Dtypes of the KV cache: that of q, or 8-bit floats with one scale for K and one for V of a layer."""

import torch
from torch import Tensor

# largest finite numbers, to which values are clamped
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def check_kv_dtype(q: Tensor, layer: Tensor, scales: Tensor | None) -> None:
    """Checks scales [2] float32, by which stored K and V are multiplied. Raises ValueError."""
    if layer.dtype not in FP8_MAX:
        if q.dtype != layer.dtype or scales is not None:
            raise ValueError(f"expected q of the pool's dtype {layer.dtype} and no scales, got {q.dtype}, {scales}")
    elif scales is None or scales.shape != (2,) or scales.dtype != torch.float32 or scales.stride(0) != 1:
        raise ValueError(f"a pool of {layer.dtype} needs scales [2] float32, got {scales}")


def dequantized_reference(layer: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """layer [num_blocks, 2, kv_heads, block_size, head_dim] times its scales, in `dtype`."""
    values = layer.to(dtype)
    return values if scales is None else values * scales.to(dtype).view(1, 2, 1, 1, 1)
