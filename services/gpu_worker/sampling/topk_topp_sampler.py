"""Samples a token for each row: the largest of logits / temperature plus Gumbel noise, within top-k, top-p and min-p.

It sorts nothing. If the tokens within the limits are among the likeliest CANDIDATES, only these get noise; otherwise
all tokens do, and the limits are checked on the winner. The choice of way depends on the row alone. Tokens tied with
the last one within top-k or top-p are kept.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels.sampling.philox_gumbel import gumbel_at, gumbel_rows
from blockyard.kernels.slots.slot_state import Field
from blockyard.services.gpu_worker.arrays import Bools, Words

GREEDY_BELOW = 1e-5  # lower temperatures are greedy
_WORD = 0xFFFFFFFF
CANDIDATES = 80  # more than usual values of top-k
NO_LIMIT = 2**31 - 1  # of top-k: the logits of a step with tokens that adapters add are wider than the vocabulary
LEAST = -9999.0  # logit or log-probability of a token that cannot be drawn: JSON has no infinity


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Truncation of each row, [rows] each."""

    top_k: Tensor  # int64, the vocabulary's size or more: no limit
    top_p: Tensor
    min_p: Tensor

    def take(self, rows: Tensor) -> "SamplingLimits":
        return SamplingLimits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Noise:
    """Key and counters of each row's random numbers."""

    key: Tensor  # [2, rows] int64
    index: Tensor  # [rows] int64, of the new token in its sequence
    choice: Tensor  # [rows] int64

    def take(self, rows: Tensor) -> "Noise":
        return Noise(self.key[:, rows], self.index[rows], self.choice[rows])


def sample(scaled: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """scaled [rows, vocab] -> scores of the winners and their token ids, [rows] each."""
    noisy = gumbel_rows(noise.key, noise.index, noise.choice, scaled.shape[1]).add_(scaled)
    won, tokens = noisy.max(dim=-1)
    return won, tokens


def sample_limited(scaled: Tensor, limits: SamplingLimits, noise: Noise) -> tuple[Tensor, Tensor]:
    """Samples within limits: min-p, then top-k, then top-p of the remaining probability, as in vLLM. See `sample`."""
    logs = scaled.log_softmax(-1)
    values, ids = logs.topk(min(CANDIDATES, logs.shape[1]), dim=-1)
    kept, is_whole = _within(values, limits, logs.shape[1])
    if is_whole.all():
        return _sample_candidates(values, ids, kept, noise)
    tokens, won = ids.new_empty(len(ids)), values.new_empty(len(ids))
    for rows, narrow in ((is_whole.nonzero()[:, 0], True), ((~is_whole).nonzero()[:, 0], False)):
        if narrow and len(rows):
            won[rows], tokens[rows] = _sample_candidates(values[rows], ids[rows], kept[rows], noise.take(rows))
        elif len(rows):
            won[rows], tokens[rows] = _sample_by_rejection(logs[rows], limits.take(rows), noise.take(rows))
    return won, tokens


def processed(logits: Tensor, temperature: Tensor, limits: SamplingLimits | None, as_logits: bool) -> Tensor:
    """logits [rows, vocab] behind penalties and masks, temperature [rows] -> values [rows, vocab].

    Tokens outside of min-p, then top-k, then top-p of the remaining probability have LEAST, as in `sample_limited`.
    as_logits: the values are scaled logits in place of log-probabilities.
    """
    scaled = logits / temperature[:, None]
    if limits is None:
        return (scaled if as_logits else scaled.log_softmax(-1)).clamp_(min=LEAST)
    ordered, order = scaled.log_softmax(-1).sort(-1, descending=True)
    kth = ordered.gather(1, limits.top_k.clamp(max=ordered.shape[1])[:, None] - 1)
    kept = (ordered >= ordered[:, :1] + limits.min_p.log()[:, None]) & (ordered >= kth)
    shares = ordered.exp().masked_fill_(~kept, 0.0)
    top_p = limits.top_p[:, None]
    kept &= (shares.cumsum(-1) - shares < top_p * shares.sum(-1, keepdim=True)) | (top_p >= 1)
    kept[:, 0] = True
    inside = torch.zeros_like(kept).scatter_(1, order, kept)
    values = scaled.masked_fill(~inside, float("-inf"))
    return (values if as_logits else values.log_softmax(-1)).clamp_(min=LEAST)


@dataclass(frozen=True, slots=True)
class NoisyRows:
    """Rows with a temperature that are sampled by the same function."""

    places: Tensor | None  # rows of the step; None: all
    temperature: Tensor  # [rows, 1]
    limits: SamplingLimits | None
    key: Tensor  # [2, rows]
    choice: Tensor  # [rows]

    def sample(self, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the winners and their token ids. logits, index: of all rows of the step."""
        if self.places is not None:
            logits, index = logits[self.places], index[self.places]
        scaled, noise = logits / self.temperature, Noise(self.key, index, self.choice)
        return sample(scaled, noise) if self.limits is None else sample_limited(scaled, self.limits, noise)


def noisy_rows(fields: Words, used: Bools, vocab_size: int, device: torch.device | None = None) -> list[NoisyRows]:
    """The rows with a temperature, by the function that samples them. fields [NUM_FIELDS, rows]: of the rows' slots.

    used: rows to look at. device: of the logits, None: the CPU.
    """

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    temperature, top_p, min_p = (fields[one].view(np.float32) for one in (Field.TEMPERATURE, Field.TOP_P, Field.MIN_P))
    top_k = fields[Field.TOP_K]
    is_noisy = (temperature >= GREEDY_BELOW) & used
    is_limited = is_noisy & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0))
    key = fields[Field.KEY : Field.KEY + 2].astype(np.int64) & _WORD
    groups = []
    for which, limited in ((is_noisy & ~is_limited, False), (is_limited, True)):
        places = np.flatnonzero(which)
        if not len(places):
            continue
        limits = None
        if limited:
            most = top_k[places].astype(np.int64)
            most[most >= vocab_size] = NO_LIMIT
            columns = (most, top_p[places], min_p[places])
            limits = SamplingLimits(*map(tensor, columns))
        groups.append(
            NoisyRows(
                None if len(places) == len(which) else tensor(places),
                tensor(temperature[places])[:, None],
                limits,
                tensor(key[:, places]),
                tensor(fields[Field.CHOICE][places].astype(np.int64)),
            )
        )
    return groups


def _within(values: Tensor, limits: SamplingLimits, vocab_size: int) -> tuple[Tensor, Tensor]:
    """values [rows, candidates], sorted log-probabilities -> which are within the limits; rows where no other is."""
    count = values.shape[1]
    least = values[:, :1] + limits.min_p.log()[:, None]
    last = (limits.top_k.clamp(max=count) - 1)[:, None]
    kept = (values >= least) & (values >= values.gather(1, last))
    is_cut = ~kept[:, -1] | (count == vocab_size)  # min-p and top-k reach no further
    shares = values.exp().masked_fill_(~kept, 0.0)
    mass = torch.where(is_cut, shares.sum(-1), 1.0)[:, None]
    before = shares.cumsum(-1) - shares
    top_p = limits.top_p[:, None]
    inside = kept & ((before < top_p * mass) | (top_p >= 1))
    inside[:, 0] = True
    kept &= values >= torch.where(inside, values, float("inf")).amin(-1, keepdim=True)
    kept[:, 0] = True
    is_plain = (limits.min_p == 0) & (limits.top_k >= vocab_size)  # then the mass above is right in any case
    return kept, is_cut | (is_plain & ~kept[:, -1])


def _sample_by_rejection(logs: Tensor, limits: SamplingLimits, noise: Noise) -> tuple[Tensor, Tensor]:
    """Samples from all tokens until the winner is within the limits: then it also wins among the tokens within them.

    A winner outside removes itself and all tokens that are not likelier.
    """
    least = logs.amax(-1) + limits.min_p.log()
    ranked = (limits.top_k < logs.shape[1]).nonzero()[:, 0]
    if len(ranked):
        top_k = limits.top_k[ranked]
        kth = logs[ranked].topk(int(top_k.max()), dim=-1).values.gather(1, top_k[:, None] - 1)[:, 0]
        least[ranked] = torch.maximum(least[ranked], kth)
    logs = torch.where(logs < least[:, None], float("-inf"), logs)
    shares = logs.softmax(-1)
    noisy = gumbel_rows(noise.key, noise.index, noise.choice, logs.shape[1]).add_(logs)
    while True:
        won, tokens = noisy.max(dim=-1)
        level = logs.gather(1, tokens[:, None])
        likelier = logs > level
        before = torch.where(likelier, shares, 0.0).sum(-1)
        outside = (before >= limits.top_p) & (limits.top_p < 1)
        if not outside.any():
            return won, tokens
        noisy = torch.where(outside[:, None] & ~likelier, float("-inf"), noisy)


def _sample_candidates(values: Tensor, ids: Tensor, kept: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    noisy = gumbel_at(noise.key, noise.index, noise.choice, ids).add_(values)
    won, places = torch.where(kept, noisy, float("-inf")).max(dim=-1)
    return won, ids.gather(1, places[:, None])[:, 0]
