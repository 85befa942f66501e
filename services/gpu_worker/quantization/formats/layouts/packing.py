"""Integers of a few bits side by side, the first one in the lowest bits, as most formats pack them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept import w4a16


def unpack(packed: Tensor, bits: int, count: int | None = None) -> Tensor:
    """Bytes uint8 [..., n] -> codes uint8 [..., count] of 1 to 8 bits. count: None for all of whole bytes.

    A code may go on in the next byte. Words have the same bytes in memory, in the order of their values as on all
    machines that this project runs on (`as_bytes`).
    """
    count = packed.shape[-1] * 8 // bits if count is None else count
    if bits == 8:
        return packed[..., :count]
    if bits == 4:
        return w4a16.unpack(packed, count)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)[..., :count]
    first = torch.arange(count, device=packed.device) * bits
    padded = F.pad(packed, (0, 1)).short()
    pairs = padded[..., first // 8] | padded[..., first // 8 + 1] << 8
    return (pairs >> (first % 8).short() & (1 << bits) - 1).to(torch.uint8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes as `unpack` reads them. The codes fill whole bytes."""
    if bits == 8:
        return codes
    if bits == 4:
        return w4a16.pack(codes)
    single = (codes[..., None] >> _bits(bits, codes) & 1).flatten(-2)
    return (torch.unflatten(single, -1, (-1, 8)) << _bits(8, codes)).sum(-1, dtype=torch.uint8)


def _bits(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


def as_bytes(words: Tensor) -> Tensor:
    """Words [..., n] -> bytes uint8 [..., n * size]."""
    return words.contiguous().view(torch.uint8)
