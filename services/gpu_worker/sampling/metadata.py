"""Sampling parameters of all slots, as arrays that a step indexes by slot."""

import numpy as np

from blockyard.kernels.sampling.philox_gumbel import split_seed
from blockyard.shared.messages import Sampling, SlotStart

GREEDY_BELOW = 1e-5  # lower temperatures are greedy


class SamplingMetadata:
    """One array for each parameter. `plain` slots take the likeliest token of the raw logits, and that is all."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.plain = np.ones(num_slots, np.bool_)
        self.noisy = np.zeros(num_slots, np.bool_)  # temperature above 0
        self.limited = np.zeros(num_slots, np.bool_)  # noisy, with top-k, top-p or min-p
        self.num_logprobs = np.full(num_slots, -1, np.int64)  # below 0: not reported
        self.temperature = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)  # vocab_size: no limit
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.key = np.zeros((2, num_slots), np.int64)  # of the random numbers
        self.choice = np.zeros(num_slots, np.int64)

    def set_temperature(self, slot: int, sampling: Sampling) -> None:
        self.noisy[slot] = sampling.temperature >= GREEDY_BELOW
        self.temperature[slot] = sampling.temperature

    def set_min_p(self, slot: int, sampling: Sampling) -> None:
        self.min_p[slot] = sampling.min_p

    def set_top_k(self, slot: int, sampling: Sampling) -> None:
        self.top_k[slot] = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size

    def set_top_p(self, slot: int, sampling: Sampling) -> None:
        self.top_p[slot] = sampling.top_p

    def start(self, start: SlotStart) -> None:
        """Call it after the parameters are set."""
        slot, sampling = start.slot, start.sampling
        noisy = bool(self.noisy[slot])
        self.limited[slot] = noisy and (self.top_k[slot] < self._vocab_size or sampling.top_p < 1 or sampling.min_p > 0)
        self.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.key[:, slot] = split_seed(sampling.seed)
        self.choice[slot] = start.choice
        self.plain[slot] = not (noisy or sampling.num_logprobs is not None)

    def set_adjusted(self, slot: int) -> None:
        """A step changes this slot's logits."""
        self.plain[slot] = False
