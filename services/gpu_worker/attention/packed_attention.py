"""Attention of one step of an encoder: packed sequences, both directions, no KV cache. On the CPU and on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices

MOST_PADDING = 1.15  # padded tokens of a call to those of its sequences: more costs more than a further call
LONG = 64  # tokens from which a sequence is padded for no other: masks and padding cost more than a further call
MOST_ROWS = 4096  # padded tokens of a call: beyond it, scores no longer fit a CPU's caches


class PackedProduct(Protocol):
    """Attention of all sequences of a step on one device."""

    def __call__(self, qkv: Tensor, rules: ScoreRules, num_heads: int) -> Tensor:
        """qkv [tokens, heads + 2 * kv_heads, head_dim] -> [tokens, heads * head_dim]."""


class PackedAttention:
    """Implements `step.Attend`."""

    def __init__(self, shapes: Sequence[AttentionShape], product: PackedProduct) -> None:
        self._shapes, self._product = shapes, product

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        shape = self._shapes[layer]
        rotated = shape.num_heads + shape.kv_heads
        if norm is not None:
            normed = len(norm.weight)
            qkv[:, :normed] = norm(qkv[:, :normed])
        if rotation is not None:
            apply_rope_reference(qkv[:, :rotated], rotation)
        return self._product(qkv, shape.rules, shape.num_heads)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        raise NotImplementedError("no encoder has latent attention")

    def of_rows(self, indices: LogitsIndices) -> Attend:
        """Every row is computed: the last layer of an encoder is pooled whole."""
        raise NotImplementedError("encoders return all rows")


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of similar length that share a call."""

    rows: Tensor  # [seqs * longest] int64, of the tokens; padding repeats a row of the same sequence
    num_seqs: int
    longest: int
    kept: Tensor | None  # [seqs * longest] bool, which rows are no padding; None: all
    is_slice: bool  # the rows are adjacent


class CpuPackedProduct:
    """Torch's attention, with one call for sequences of similar length."""

    def __init__(self, lengths: Ints, *, alone: bool = False) -> None:
        """lengths: of the sequences, in the order of their rows. alone: each has a call of its own, so that its numbers
        do not depend on the others."""
        self._groups = [_make_group(lengths, places) for places in _group_places(lengths, alone)]
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._lengths = [lengths[places] for places in _group_places(lengths, alone)]

    def __call__(self, qkv: Tensor, rules: ScoreRules, num_heads: int) -> Tensor:
        """Implements `PackedProduct`."""
        tokens, all_heads, head_dim = qkv.shape
        kv_heads = (all_heads - num_heads) // 2
        out = torch.empty(tokens, num_heads * head_dim, dtype=qkv.dtype)
        for number, group in enumerate(self._groups):
            first = int(group.rows[0])
            rows = qkv[first : first + len(group.rows)] if group.is_slice else qkv.index_select(0, group.rows)
            heads = rows.view(group.num_seqs, group.longest, all_heads, head_dim).transpose(1, 2)
            q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], 1)
            mask = self._mask(number, rules, qkv.dtype)
            found = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=rules.scale, enable_gqa=kv_heads < num_heads
            )
            found = found.transpose(1, 2).reshape(len(group.rows), -1)
            if group.is_slice:
                out[first : first + len(group.rows)] = found
            elif group.kept is None:
                out[group.rows] = found
            else:
                out[group.rows[group.kept]] = found[group.kept]
        return out

    def _mask(self, number: int, rules: ScoreRules, dtype: torch.dtype) -> Tensor | None:
        """[seqs or 1, 1, queries or 1, keys], which is added to scores: layers with the same window share it."""
        key = number, rules.window
        if key not in self._masks:
            self._masks[key] = _make_mask(self._groups[number], self._lengths[number], rules.window, dtype)
        return self._masks[key]


def _group_places(lengths: Ints, alone: bool) -> list[Ints]:
    """The places of the sequences of each group. Empty sequences are in none."""
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    if alone:
        return [order[i : i + 1] for i in range(len(order))]
    groups, first, total = [], 0, 0
    for i, length in enumerate(lengths[order].tolist()):
        padded = (i - first + 1) * length
        total += length
        most = min((MOST_PADDING if length < LONG else 1.0) * total, MOST_ROWS)
        if i > first and padded > most:
            groups.append(np.sort(order[first:i]))
            first, total = i, length
    if first < len(order):
        groups.append(np.sort(order[first:]))
    return groups


def _make_group(lengths: Ints, places: Ints) -> _Group:
    starts = np.cumsum(lengths) - lengths
    own, longest = lengths[places], int(lengths[places].max())
    offsets = np.arange(longest)
    rows = starts[places][:, None] + np.minimum(offsets, own[:, None] - 1)
    kept = None if bool((own == longest).all()) else torch.from_numpy((offsets < own[:, None]).reshape(-1))
    flat = rows.reshape(-1)
    is_slice = kept is None and bool((np.diff(flat) == 1).all())
    return _Group(torch.from_numpy(np.ascontiguousarray(flat)), len(places), longest, kept, is_slice)


def _make_mask(group: _Group, lengths: Ints, window: int | None, dtype: torch.dtype) -> Tensor | None:
    if window is not None and window >= group.longest:
        window = None
    if group.kept is None and window is None:
        return None
    place = torch.arange(group.longest)
    visible = (place < torch.from_numpy(lengths)[:, None])[:, None, None]
    if window is not None:
        # a padding query is near its own key alone: it has to see one
        near = (place[:, None] - place).abs() < window
        visible = (visible & near) | torch.eye(group.longest, dtype=torch.bool)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
