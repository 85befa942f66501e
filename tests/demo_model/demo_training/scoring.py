"""Held-out loss of a model, in bits per byte of text: comparable between tokenizers."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.packing import Ids

Wide = npt.NDArray[np.int64]

IGNORED = -100


def scoring_windows(document: Ids, window: int, stride: int) -> list[tuple[Wide, Wide]]:
    """(inputs, targets) pairs that score every token after the first once, each with up to `window` before it.

    Targets already scored by an earlier window are marked IGNORED.
    """
    pairs = []
    scored = 0
    for start in range(0, max(len(document) - 1, 1), stride):
        inputs = document[start : start + window].astype(np.int64)
        targets = document[start + 1 : start + window + 1].astype(np.int64)
        targets[: scored - start] = IGNORED
        pairs.append((inputs[: len(targets)], targets))
        scored = start + len(targets)
        if scored >= len(document) - 1:
            break
    return pairs


def padded(pairs: list[tuple[Wide, Wide]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two [batch, longest] tensors; positions after a window's end have id 0 and IGNORED."""
    longest = max(len(inputs) for inputs, _ in pairs)
    inputs = torch.zeros(len(pairs), longest, dtype=torch.long)
    targets = torch.full((len(pairs), longest), IGNORED)
    for row, (ids, wanted) in enumerate(pairs):
        inputs[row, : len(ids)] = torch.from_numpy(ids)
        targets[row, : len(wanted)] = torch.from_numpy(wanted)
    return inputs.to(device), targets.to(device)


@torch.no_grad()
def total_nats(
    model: Callable[[Tensor], Tensor], documents: list[Ids], window: int, stride: int, device: torch.device
) -> float:
    """Summed negative log likelihood of all tokens but each document's first."""
    pairs = [pair for document in documents for pair in scoring_windows(document, window, stride)]
    pairs.sort(key=lambda pair: len(pair[0]))
    batch = max(1, 65536 // window) if device.type == "cuda" else 1
    total = 0.0
    for start in range(0, len(pairs), batch):
        inputs, targets = padded(pairs[start : start + batch], device)
        logits = model(inputs).float()
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
    return total


def bits_per_byte(nats: float, num_bytes: int) -> float:
    return nats / math.log(2) / num_bytes
