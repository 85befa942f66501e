"""What `sample_tokens` computes, in plain torch, by sorting."""

import torch
from torch import Tensor

from blockyard.kernels.sampling.philox_gumbel import gumbel_rows
from blockyard.kernels.sampling.sample_tokens import SamplingTensors


def sample_tokens_reference(
    logits: Tensor, slots: Tensor, index: Tensor, params: SamplingTensors
) -> tuple[Tensor, Tensor]:
    """Tokens [rows] and winning values [rows] by sorting, in the precision of `logits`, on any device."""
    tokens = torch.zeros_like(slots)
    best = torch.zeros(len(slots), dtype=logits.dtype, device=logits.device)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        values = logits[row]
        if params.temperature[slot] >= 1e-5:
            key = params.key[:, slot : slot + 1].long() & 0xFFFFFFFF
            noise = gumbel_rows(key, index[row : row + 1], params.choice[slot : slot + 1].long(), len(values))[0]
            logs = (values / params.temperature[slot].to(values.dtype)).log_softmax(-1)
            kept = _kept_reference(logs, params, slot)
            values = torch.where(kept, logs + noise, float("-inf"))
        best[row], tokens[row] = values.max(-1)
    return tokens, best


def _kept_reference(logs: Tensor, params: SamplingTensors, slot: int) -> Tensor:
    """What the limits leave of logs [vocab]: min-p, then top-k, then top-p of the rest's mass. Equals stay together."""
    order = logs.sort(descending=True).values
    kept = logs >= order[0] + params.min_p[slot].log()
    kept &= logs >= order[min(int(params.top_k[slot]), len(order)) - 1]
    if params.top_p[slot] < 1:
        shares = torch.where(kept, logs.exp(), 0.0)
        ranked = shares.sort(descending=True).values
        before = ranked.cumsum(-1) - ranked
        inside = before < params.top_p[slot] * shares.sum()
        kept &= shares >= ranked[inside].min()
    return kept
