"""Tokens that are forbidden or favoured: allowed ids, bad words, min_tokens and logit_bias."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import Sampling

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Edit:
    """Of one slot. Bad words count against the output alone, as in vLLM."""

    allowed: Tensor | None  # ids; all others are forbidden
    forbidden: list[int]  # bad words of one token
    phrases: list[list[int]]  # bad words of several
    bias: list[tuple[int, float]]
    min_tokens: int
    endings: list[int]  # not before min_tokens


def make_edit(sampling: Sampling, eos_token_ids: list[int], vocab_size: int, device: torch.device) -> Edit | None:
    """None where the logits stay as they are."""
    endings = [i for i in {*eos_token_ids, *sampling.stop_token_ids} if 0 <= i < vocab_size]
    edit = Edit(
        torch.tensor(sampling.allowed_token_ids, device=device) if sampling.allowed_token_ids else None,
        [words[0] for words in sampling.bad_words if len(words) == 1],
        [words for words in sampling.bad_words if len(words) > 1],
        sampling.logit_bias,
        sampling.min_tokens,
        endings if sampling.min_tokens else [],
    )
    changes = edit.allowed is not None or edit.forbidden or edit.phrases or edit.bias or edit.endings
    return edit if changes else None


def apply_edits(logits: Tensor, edits: list[tuple[int, int, Edit]], table: Slots) -> None:
    """Changes logits [rows, vocab] in place; `edits` are (row, slot, edit)."""
    forbidden: list[tuple[int, int]] = []
    bias: list[tuple[int, int, float]] = []
    for row, slot, edit in edits:
        if edit.allowed is not None:
            kept = logits[row, edit.allowed]
            logits[row].fill_(float("-inf"))
            logits[row, edit.allowed] = kept
        forbidden += [(row, token) for token in _forbidden(slot, edit, table)]
        bias += [(row, token, value) for token, value in edit.bias]
    if forbidden:
        index = torch.tensor(forbidden, device=logits.device)
        logits[index[:, 0], index[:, 1]] = float("-inf")
    if bias:
        index = torch.tensor([(row, token) for row, token, _ in bias], device=logits.device)
        values = torch.tensor([value for *_, value in bias], dtype=logits.dtype, device=logits.device)
        logits.index_put_((index[:, 0], index[:, 1]), values, accumulate=True)


def _forbidden(slot: int, edit: Edit, table: Slots) -> list[int]:
    first, known = table.slots[slot].num_prompt_tokens, int(table.num_tokens[slot])
    tokens = list(edit.forbidden)
    for phrase in edit.phrases:
        begin = known - len(phrase) + 1
        if begin >= first and table.token_ids[slot, begin:known].tolist() == phrase[:-1]:
            tokens.append(phrase[-1])
    if known - first < edit.min_tokens:
        tokens += edit.endings
    return tokens
