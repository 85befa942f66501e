"""Logits processors on the device: masks, logit bias, banned tokens, then penalties; for CUDA graphs.

Only slots that need it have a row of token counts and one of adjusted logits; raw logits stay as they are. The order
is vLLM's: masks, bias and bans first, then repetition, frequency and presence penalties. Lists that are too long for a
slot, and bans of token sequences, are computed by the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.sampling.sampling_state import SEEN, LogitsEdits, RowMasks
from blockyard.kernels.sampling.wait_for_masks import apply_mask
from blockyard.kernels.tensor_checks import check_tensor

_TILE = 1024


@triton.jit
def _penalize(x, count, repetition, presence, frequency, SEEN: tl.constexpr):
    by = tl.where(count > 0, repetition, 1.0)
    x = tl.where(x > 0, x / by, x * by)
    number = count & (SEEN - 1)
    return x - frequency * number.to(tl.float32) - tl.where(number > 0, presence, 0.0)


@triton.jit
def _penalize_kernel(
    logits_ptr, slots_ptr, index_ptr, row_ptr, penalties, lists, counts_ptr, out_ptr, words_ptr, states_ptr, stride,
    vocab, row_size, num_words, masked_vocab,
    MOST: tl.constexpr, SEEN: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # program (i, j): tile j of row i, and the listed tokens in it
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + place)
    row = tl.load(row_ptr + slot, mask=slot >= 0, other=-1).to(tl.int64)
    if row < 0:
        return
    repetition_ptr, presence_ptr, frequency_ptr = penalties
    only_ptr, num_ptr, listed_ptr, bias_ptr, until_ptr = lists
    repetition, presence = tl.load(repetition_ptr + slot), tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    begin = tl.program_id(1) * TILE
    cols = begin + tl.arange(0, TILE)
    inside = cols < vocab
    x = tl.load(logits_ptr + place * stride + cols, mask=inside, other=0.0).to(tl.float32)
    state = tl.full([], 1, tl.int32)  # of MaskState
    if MASKED:
        state = tl.load(states_ptr + place)
        words_ptr += place * num_words
        if state == 2:
            x = apply_mask(x, words_ptr, cols, inside, masked_vocab)
        elif state == 0:
            x = tl.full([TILE], float("-inf"), tl.float32)
    x = tl.where(tl.load(only_ptr + slot) != 0, float("-inf"), x)
    count = tl.load(counts_ptr + row * row_size + cols, mask=inside, other=0)
    tl.store(out_ptr + row * row_size + cols, _penalize(x, count, repetition, presence, frequency, SEEN), mask=inside)
    num = tl.load(num_ptr + slot)
    if num > 0:
        tl.debug_barrier()  # the stores below overwrite some of the stores above
        entries = tl.arange(0, MOST)
        ids = tl.load(listed_ptr + slot * MOST + entries, mask=entries < num, other=-1)
        here = (ids >= begin) & (ids < begin + TILE)
        changed = tl.load(logits_ptr + place * stride + ids, mask=here, other=0.0).to(tl.float32)
        if MASKED:
            if state == 2:
                changed = apply_mask(changed, words_ptr, ids, here, masked_vocab)
            elif state == 0:
                changed = tl.full([MOST], float("-inf"), tl.float32)
        changed += tl.load(bias_ptr + slot * MOST + entries, mask=here, other=0.0)
        until = tl.load(until_ptr + slot * MOST + entries, mask=here, other=0)
        changed = tl.where(tl.load(index_ptr + place) < until, float("-inf"), changed)
        number = tl.load(counts_ptr + row * row_size + ids, mask=here, other=0)
        tl.store(
            out_ptr + row * row_size + ids, _penalize(changed, number, repetition, presence, frequency, SEEN), mask=here
        )


def penalize_logits(
    logits: Tensor, slots: Tensor, index: Tensor, edits: LogitsEdits, masked: RowMasks | None = None
) -> None:
    """logits [rows, vocab], rows may be strided -> first columns of edits.logits, for the slots that have a row there.

    slots [rows] int64, below 0 for padding rows; index [rows] int64, the new token's index in its sequence. Sample with
    `AdjustedLogits(edits.row, edits.logits[:, :vocab])`. masked: masks of the rows that have a constraint; None: no row
    has one. A slot with a constraint needs a row, and a row whose mask is missing allows no token. Listed ids must lie
    in the vocabulary: not checked on device. Raises ValueError for other shapes and dtypes.
    """
    rows, vocab = logits.shape
    edits.check(vocab)
    if logits.stride(1) != 1:
        raise ValueError(f"the elements of a row must be contiguous, got strides {logits.stride()}")
    for name, one in (("slots", slots), ("index", index)):
        check_tensor(name, one, (rows,), torch.int64)
    if rows == 0 or edits.counts.shape[0] == 0:
        return
    penalties = (edits.repetition, edits.presence, edits.frequency)
    lists = (edits.only_listed, edits.num_listed, edits.listed, edits.bias, edits.until)
    words, states = (slots, slots) if masked is None else (masked.words, masked.states)
    if masked is not None:
        masked.masks.check(masked.vocab_size)
        check_tensor("words", words, (rows, ceil_div(masked.vocab_size, 32)), torch.int32)
        check_tensor("states", states, (rows,), torch.int32)
    _penalize_kernel[(rows, ceil_div(vocab, _TILE))](
        logits, slots, index, edits.row, penalties, lists, edits.counts, edits.logits, words, states,
        logits.stride(0), vocab, edits.counts.shape[1], words.shape[-1], 0 if masked is None else masked.vocab_size,
        MOST=edits.listed.shape[1], SEEN=SEEN, MASKED=masked is not None, TILE=_TILE,
    )  # fmt: skip


@triton.jit
def _count_kernel(tokens_ptr, best_ptr, ready_ptr, slots_ptr, row_ptr, counts_ptr, num, vocab, TILE: tl.constexpr):
    # program i: TILE rows; no two rows have the same slot
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = places < num
    slots = tl.load(slots_ptr + places, mask=inside, other=-1)
    row = tl.load(row_ptr + slots, mask=slots >= 0, other=-1).to(tl.int64)
    best = tl.load(best_ptr + places, mask=inside, other=0.0)
    sampled = (row >= 0) & (tl.abs(best) < float("inf"))
    sampled &= tl.load(ready_ptr + places, mask=inside, other=0) != 0
    where = counts_ptr + row * vocab + tl.load(tokens_ptr + places, mask=inside, other=0)
    tl.store(where, tl.load(where, mask=sampled, other=0) + 1, mask=sampled)


def count_tokens(tokens: Tensor, best: Tensor, ready: Tensor, slots: Tensor, edits: LogitsEdits) -> None:
    """Counts what `sample_tokens` drew for the slots that have a row: tokens, slots [rows] int64, best [rows] float32.

    Rows that wait (ready [rows] int32 is 0), and rows in which no token could win (best not finite), count nothing; no
    two rows may be of one slot.
    """
    rows = tokens.shape[0]
    check_tensor("tokens", tokens, (rows,), torch.int64)
    check_tensor("slots", slots, (rows,), torch.int64)
    check_tensor("best", best, (rows,), torch.float32)
    check_tensor("ready", ready, (rows,), torch.int32)
    if rows and edits.counts.shape[0]:
        vocab = edits.counts.shape[1]
        grid = (ceil_div(rows, 128),)
        _count_kernel[grid](tokens, best, ready, slots, edits.row, edits.counts, rows, vocab, TILE=128)
