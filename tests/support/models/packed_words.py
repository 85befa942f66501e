"""Integers packed in words, bit by bit, as the layouts of GPTQ, AWQ and Marlin say."""

import numpy as np
import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int, size: int = 32) -> Tensor:
    """Codes [n, m] -> words int32 or int16 [n, m * bits / size]: code i has the bits from i * bits on of its row."""
    n, m = codes.shape
    assert m * bits % size == 0
    single = codes.numpy().astype(np.uint64)[:, :, None] >> np.arange(bits, dtype=np.uint64) & 1  # the lowest bit first
    words = (single.reshape(n, -1, size) << np.arange(size, dtype=np.uint64)).sum(2)
    unsigned = words.astype(np.uint32 if size == 32 else np.uint16)
    return torch.from_numpy(unsigned.view(np.int32 if size == 32 else np.int16))


def _marlin_tables() -> tuple[list[int], list[int], list[int]]:
    """As AutoGPTQ's qlinear_marlin.py makes them: which of 1,024 codes, 64 scales and 32 scales stand where."""
    codes = []
    for lane in range(32):
        rows = [2 * (lane % 4) + extra for extra in (0, 1, 8, 9)]
        own = [16 * row + lane // 4 + 8 * block for block in (0, 1) for row in rows]
        codes += [256 * tile + own[i] for tile in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return codes, grouped, single


def in_marlin_order(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [inputs, outputs] -> words int32 [inputs / 16, outputs * 2]; scales [groups, outputs] -> the same shape."""
    (inputs, outputs), (of_codes, grouped, single) = codes.shape, _marlin_tables()
    tiles = codes.reshape(inputs // 16, 16, outputs // 16, 16).permute(0, 2, 1, 3)
    ordered = tiles.reshape(-1, 1024)[:, of_codes].reshape(inputs // 16, outputs * 16)
    table = single if len(scales) == 1 else grouped
    return pack_words(ordered, 4), scales.reshape(-1, len(table))[:, table].reshape(scales.shape)
