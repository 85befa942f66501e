"""Picks a token a row: the pipeline over the parts in this folder."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import SlotStart, TokenLogprobs

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sampled:
    """A token for each row; rows with a problem have one that is not to be used."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row
    problems: dict[int, str] = field(default_factory=dict)


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: list[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, eos_token_ids, device

    def reset(self, num_slots: int) -> None:
        pass

    def start(self, start: SlotStart) -> str:
        return ""

    def end(self, slot: int) -> None:
        pass

    def sample(self, logits: Tensor, slots: Ints, table: Slots) -> Sampled:
        best = logits.max(dim=-1)
        sampled = Sampled(best.indices.tolist())
        for i, value in enumerate(best.values.tolist()):
            if not -np.inf < value < np.inf:
                sampled.problems[i] = "the model's logits are not finite"
        return sampled
