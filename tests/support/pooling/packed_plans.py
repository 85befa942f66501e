"""Packed plans of texts, for a runner of a model without KV, and their results by text."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.shared.messages import PackedPart, PackedStep, PackedVectors, StepPlan


def packed(texts: Sequence[Sequence[int]], parts: list[PackedPart] | None = None) -> PackedStep:
    """parts: None for texts that ask for nothing."""
    ids, lengths = array("I", [token for text in texts for token in text]), array("I", map(len, texts))
    return PackedStep(ids.tobytes(), lengths.tobytes(), parts or [PackedPart(len(texts))])


def run(
    runner: EncoderRunner,
    texts: Sequence[Sequence[int]],
    second_starts: Sequence[int] = (),
    parts: list[PackedPart] | None = None,
) -> PackedVectors:
    """Runs all texts in one step. second_starts: where the second text of each pair begins."""
    runner.reset(0)
    if second_starts:
        parts = [PackedPart(len(texts), second_starts=array("I", second_starts).tobytes())]
    return runner.execute(StepPlan(0, 1, [], [], [], [], packed=packed(texts, parts)))


def rows_of(found: PackedVectors) -> list[Tensor]:
    """The numbers of each text."""
    numbers = torch.from_numpy(np.frombuffer(found.data, "<f4").copy())
    return list(numbers.split(array("I", found.lengths).tolist()))
