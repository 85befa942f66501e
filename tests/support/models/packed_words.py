"""Integers packed in words, code by code, as the layouts of GPTQ, AWQ and Marlin say."""

import numpy as np
import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int, size: int = 32) -> Tensor:
    """Codes [n, m] -> words int32 or int16 [n, m * bits / size]: code i has the bits from i * bits on of its row."""
    n, m = codes.shape
    assert m * bits % size == 0
    words = [[0] * (m * bits // size) for _ in range(n)]
    for row, own in enumerate(codes.tolist()):
        for i, code in enumerate(own):
            word, shift = divmod(i * bits, size)
            words[row][word] |= code << shift & (1 << size) - 1
            if shift + bits > size:
                words[row][word + 1] |= code >> size - shift
    unsigned = np.array(words, dtype=np.uint32 if size == 32 else np.uint16)
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
