"""Sampling parameters of all slots, as arrays that a step indexes by slot."""

import numpy as np
import numpy.typing as npt

from blockyard.kernels.sampling.philox_gumbel import split_seed
from blockyard.shared.messages import Sampling, SlotStart

Ints = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5  # temperatures under it are 0


class SamplingMetadata:
    """`plain` slots take the likeliest token of the raw logits and nothing else is asked of them."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.plain = np.ones(num_slots, np.bool_)
        self.noisy = np.zeros(num_slots, np.bool_)  # temperature above 0
        self.limited = np.zeros(num_slots, np.bool_)  # noisy, with top-k, top-p or min-p
        self.num_logprobs = np.full(num_slots, -1, np.int64)  # below 0: not asked for
        self.temperature = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)  # vocab_size is all
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.key = np.zeros((2, num_slots), np.int64)  # of the noise
        self.choice = np.zeros(num_slots, np.int64)

    def start(self, start: SlotStart, adjusted: bool) -> None:
        """`adjusted`: something changes this slot's logits before the choice."""
        slot, asked = start.slot, start.sampling
        noisy = asked.temperature >= GREEDY_BELOW
        self.noisy[slot] = noisy
        self.temperature[slot] = asked.temperature
        self.top_k[slot] = asked.top_k if 0 < asked.top_k < self._vocab_size else self._vocab_size
        self.top_p[slot], self.min_p[slot] = asked.top_p, asked.min_p
        self.limited[slot] = noisy and (self.top_k[slot] < self._vocab_size or asked.top_p < 1 or asked.min_p > 0)
        self.num_logprobs[slot] = -1 if asked.num_logprobs is None else asked.num_logprobs
        self.key[:, slot] = split_seed(asked.seed)
        self.choice[slot] = start.choice
        self.plain[slot] = not (noisy or adjusted or asked.num_logprobs is not None)


def unsupported_reason(sampling: Sampling, vocab_size: int) -> str:
    """Why these parameters cannot be followed; empty if they can. The gateway checks them; this keeps a step alive."""
    ids = [i for i, _ in sampling.logit_bias]
    ids += sampling.allowed_token_ids
    ids += [i for phrase in sampling.bad_words for i in phrase]
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        return f"token id {wrong} is outside of the vocabulary of {vocab_size}"
    numbers = {
        "temperature": sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "repetition_penalty": sampling.repetition_penalty > 0,
        "presence_penalty": abs(sampling.presence_penalty) < float("inf"),
        "frequency_penalty": abs(sampling.frequency_penalty) < float("inf"),
    }
    bad = next((name for name, right in numbers.items() if not right), None)  # NaN compares false
    return f"{bad} cannot be {getattr(sampling, bad)}" if bad else ""
