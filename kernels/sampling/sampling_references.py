"""The references of the sampling kernels, in plain torch on any device. Imports no Triton."""

import torch
from torch import Tensor

from blockyard.kernels.sampling.sampling_state import (
    INDEX_BITS,
    SEEN,
    TOKEN_BITS,
    LogitsEdits,
    LogprobsTensors,
    MaskState,
    MaskTensors,
    RowMasks,
)


def wait_for_masks_reference(slots: Tensor, index: Tensor, masks: MaskTensors, states: Tensor, words: Tensor) -> None:
    """As `wait_for_masks`, without waiting."""
    for row, (slot, at) in enumerate(zip(slots.tolist(), index.tolist(), strict=True)):
        owner = int(masks.owners[slot]) if slot >= 0 else 0
        there = owner != 0 and int(masks.tags[slot, at % 2]) == owner << 32 | at
        states[row] = MaskState.FREE if owner == 0 else MaskState.MASKED if there else MaskState.MISSING
        if owner:
            masks.late[slot] = not there
        if there:
            words[row] = masks.words[slot, at % 2].to(words.device)


def publish_sampled_reference(
    tokens: Tensor, best: Tensor, slots: Tensor, index: Tensor, masks: MaskTensors, states: Tensor
) -> None:
    for row, slot in enumerate(slots.tolist()):
        if states[row] == MaskState.MASKED and abs(float(best[row])) < float("inf"):
            owner, at = int(masks.owners[slot]), int(index[row])
            masks.sampled[slot] = owner << (INDEX_BITS + TOKEN_BITS) | at << TOKEN_BITS | int(tokens[row])


def penalize_logits_reference(
    logits: Tensor, slots: Tensor, index: Tensor, edits: LogitsEdits, masked: RowMasks | None = None
) -> None:
    """As `penalize_logits`, in the precision of edits.logits."""
    for place, slot in enumerate(slots.tolist()):
        row = int(edits.row[slot]) if slot >= 0 else -1
        if row < 0:
            continue
        num = int(edits.num_listed[slot])
        listed = edits.listed[slot, :num].long()
        x = logits[place].to(edits.logits.dtype)
        if masked is not None:
            x = _masked_reference(x, masked, place)
        changed = x[listed] + edits.bias[slot, :num]
        changed[index[place] < edits.until[slot, :num]] = float("-inf")
        x = torch.full_like(x, float("-inf")) if edits.only_listed[slot] else x.clone()
        x[listed] = changed
        counts = edits.counts[row, : len(x)]
        by = torch.where(counts > 0, edits.repetition[slot], 1.0)
        x = torch.where(x > 0, x / by, x * by)
        number = counts & (SEEN - 1)
        x -= edits.frequency[slot] * number + edits.presence[slot] * (number > 0)
        edits.logits[row, : len(x)] = x


def _masked_reference(x: Tensor, masked: RowMasks, place: int) -> Tensor:
    if masked.states[place] == MaskState.MISSING:
        return torch.full_like(x, float("-inf"))
    if masked.states[place] == MaskState.FREE:
        return x
    token = torch.arange(len(x), device=x.device)
    word = masked.words[place][token.clamp(max=masked.vocab_size - 1) // 32]
    return torch.where((word >> (token % 32) & 1 != 0) & (token < masked.vocab_size), x, float("-inf"))


def count_tokens_reference(tokens: Tensor, best: Tensor, ready: Tensor, slots: Tensor, edits: LogitsEdits) -> None:
    columns = (tokens, best, ready, slots)
    for token, value, is_ready, slot in zip(*(column.tolist() for column in columns), strict=True):
        row = int(edits.row[slot]) if slot >= 0 else -1
        if row >= 0 and is_ready and abs(value) < float("inf"):
            edits.counts[row, token] += 1


def gather_logprobs_reference(
    logits: Tensor, slots: Tensor, tokens: Tensor, num_top: Tensor, out: LogprobsTensors
) -> None:
    for row, slot in enumerate(slots.tolist()):
        num = int(num_top[slot]) if slot >= 0 else -1
        if num < 0:
            continue
        logprobs = logits[row].log_softmax(-1)
        chosen = logprobs[tokens[row]]
        out.logprob[row], out.rank[row] = chosen, (logits[row] > logits[row, tokens[row]]).sum() + 1
        order = logits[row].sort(descending=True, stable=True).indices[: min(num, out.top_ids.shape[1])]
        out.top_ids[row, : len(order)], out.top_logprobs[row, : len(order)] = order.int(), logprobs[order]


def copy_logits_reference(logits: Tensor, slots: Tensor, row: Tensor, out: Tensor) -> None:
    for place, slot in enumerate(slots.tolist()):
        if slot >= 0 and row[slot] >= 0:
            out[int(row[slot])] = float("-inf")
            out[int(row[slot]), : logits.shape[1]] = logits[place]
