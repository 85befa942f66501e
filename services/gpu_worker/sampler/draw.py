"""Draws a token a row: the largest of logits / temperature plus noise, among what top-k, top-p and min-p leave.

Sorting is avoided: the tokens they leave are nearly always among the few likeliest, and only those get noise then.
Which way a row takes changes nothing about its token, as noise belongs to the token id.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.philox_gumbel import gumbel_at, gumbel_rows

CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What a row may choose from; all [rows]."""

    top_k: Tensor  # int64, the vocabulary's size is all
    top_p: Tensor
    min_p: Tensor

    def take(self, rows: Tensor) -> "Limits":
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Noise:
    """What decides a row's noise, besides the token id."""

    key: Tensor  # [2, rows] int64
    index: Tensor  # [rows] int64, of the new token in its sequence
    choice: Tensor  # [rows] int64

    def take(self, rows: Tensor) -> "Noise":
        return Noise(self.key[:, rows], self.index[rows], self.choice[rows])


def draw(scaled: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """scaled [rows, vocab] -> token ids and what they won with, [rows] each."""
    noisy = gumbel_rows(noise.key, noise.index, noise.choice, scaled.shape[1]).add_(scaled)
    values, tokens = noisy.max(dim=-1)
    return tokens, values


def draw_limited(scaled: Tensor, limits: Limits, noise: Noise) -> tuple[Tensor, Tensor]:
    """As `draw`, among what the limits leave: min-p first, then top-k, then top-p of the rest's mass, as in vLLM."""
    vocab_size = scaled.shape[1]
    some = int(torch.where(limits.top_k < vocab_size, limits.top_k, CANDIDATES).max())
    values, ids, kept = _candidates(scaled, limits, min(max(some, CANDIDATES), vocab_size))
    tokens, won = _draw_among(values, ids, kept, noise)
    if values.shape[1] == vocab_size:
        return tokens, won
    wide = kept[:, -1].nonzero()[:, 0]  # more than the candidates may be left: rank everything
    if len(wide):
        values, _, kept = _candidates(scaled[wide], limits.take(wide), vocab_size)
        least = values.masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
        rest = scaled[wide]
        rest = rest.masked_fill(rest < least, float("-inf"))
        tokens[wide], won[wide] = draw(rest, noise.take(wide))
    return tokens, won


def _candidates(scaled: Tensor, limits: Limits, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` likeliest of each row, likeliest first: values, ids and which of them the limits leave."""
    values, ids = scaled.topk(count, dim=-1)
    last = (limits.top_k.clamp(max=count) - 1)[:, None]
    least = torch.maximum(values[:, :1] + limits.min_p.log()[:, None], values.gather(1, last))
    least = torch.where(limits.top_k[:, None] <= count, least, values[:, :1] + limits.min_p.log()[:, None])
    mass = scaled.masked_fill(scaled < least, float("-inf")).logsumexp(-1, keepdim=True)
    kept = values >= least
    shares = (values - mass).exp().masked_fill(~kept, 0.0)
    before = shares.cumsum(-1) - shares
    kept &= (before < limits.top_p[:, None]) | (limits.top_p[:, None] >= 1)
    kept[:, 0] = True
    return values, ids, kept


def _draw_among(values: Tensor, ids: Tensor, kept: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    shape = ids.shape
    index, choice = (t[:, None].expand(shape).reshape(-1) for t in (noise.index, noise.choice))
    key = noise.key[:, :, None].expand(2, *shape).reshape(2, -1)
    gumbel = gumbel_at(key, index, choice, ids.reshape(-1)).view(shape)
    won, places = (values + gumbel).masked_fill(~kept, float("-inf")).max(dim=-1)
    return ids.gather(1, places[:, None])[:, 0], won
