"""Masks of structured output: the device waits for them, and says which token it has sampled under each.

Another process, the matcher, writes masks into pinned host memory and reads the sampled tokens there. A slot has two
masks, for even and for odd indexes of the new token, each with a tag that is written last: the slot's owner and the
index. So a mask of an earlier owner, or of another token, is never taken. Words are read once, around the caches, which
may hold those of an earlier step, and copied to the device. The worker's `structured_output.mask_memory` describes the
memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.sampling.sampling_state import INDEX_BITS, TOKEN_BITS, MaskTensors
from blockyard.kernels.tensor_checks import check_tensor

_TILE = 128
_WORDS_TILE = 1024  # words that a program copies


@triton.jit
def apply_mask(x, words_ptr, cols, inside, masked_vocab):
    """x where the bit of token `cols` is set in `words_ptr`, -inf elsewhere. masked_vocab: tokens that have bits."""
    words = tl.load(words_ptr + (cols >> 5), mask=inside & (cols < masked_vocab), other=0)
    return tl.where((words >> (cols & 31)) & 1 != 0, x, float("-inf"))


@triton.jit
def _wait_kernel(
    slots_ptr, index_ptr, owners_ptr, late_ptr, tags_ptr, states_ptr, num, polls, TILE: tl.constexpr
):  # fmt: skip
    # program i: tile i of the rows, so that their tags are read together; numbers of states are from MaskState
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num
    slot = tl.load(slots_ptr + row, mask=inside, other=-1)
    owner = tl.load(owners_ptr + slot, mask=slot >= 0, other=0).to(tl.int64)
    masked = owner != 0
    index = tl.load(index_ptr + row, mask=masked, other=0)
    wanted = (owner << 32) | index
    tag_ptr = tags_ptr + slot * 2 + (index & 1)
    tag = tl.load(tag_ptr, mask=masked, other=0, volatile=True)
    in_time = masked & (tl.load(late_ptr + slot, mask=masked, other=1) == 0)
    missing = tl.sum((in_time & (tag != wanted)).to(tl.int32), 0)
    left = polls
    while (missing > 0) & (left > 0):
        again = tl.load(tag_ptr, mask=masked & (tag != wanted), other=0, volatile=True)
        tag = tl.where(tag == wanted, tag, again)
        missing = tl.sum((in_time & (tag != wanted)).to(tl.int32), 0)
        left -= 1
    tl.store(states_ptr + row, tl.where(masked, tl.where(tag == wanted, 2, 0), 1), mask=inside)
    tl.store(late_ptr + slot, (tag != wanted).to(tl.int32), mask=masked)


@triton.jit
def _copy_words_kernel(slots_ptr, index_ptr, states_ptr, words_ptr, out_ptr, num_words, TILE: tl.constexpr):
    # program (i, j): tile j of the mask of row i
    row = tl.program_id(0).to(tl.int64)
    if tl.load(states_ptr + row) == 2:
        words_ptr += (tl.load(slots_ptr + row) * 2 + (tl.load(index_ptr + row) & 1)) * num_words
        at = tl.program_id(1) * TILE + tl.arange(0, TILE)
        words = tl.load(words_ptr + at, mask=at < num_words, other=0, volatile=True)
        tl.store(out_ptr + row * num_words + at, words, mask=at < num_words)


def wait_for_masks(slots: Tensor, index: Tensor, masks: MaskTensors, states: Tensor, words: Tensor, polls: int) -> None:
    """Sets states [rows] int32 to the MaskState of each row, after at most `polls` further reads of missing tags.

    words [rows, ceil(vocab / 32)] int32, on the device, gets the masks of the rows that have one.
    slots [rows] int64, below 0 for rows that sample nothing, no slot twice; index [rows] int64, the new token's index
    in its sequence. A read takes 4 us or more on an H200. A slot that is late already is not waited for again: a mask
    that takes longer than a step delays the other rows once. Raises ValueError for other shapes and dtypes.
    """
    rows = len(slots)
    check_tensor("slots", slots, (rows,), torch.int64)
    check_tensor("index", index, (rows,), torch.int64)
    check_tensor("states", states, (rows,), torch.int32)
    num_words = masks.words.shape[-1]
    check_tensor("words", words, (rows, num_words), torch.int32)
    if rows:
        _wait_kernel[(ceil_div(rows, _TILE),)](
            slots, index, masks.owners, masks.late, masks.tags, states, rows, polls, TILE=_TILE, num_warps=4
        )
        _copy_words_kernel[(rows, ceil_div(num_words, _WORDS_TILE))](
            slots, index, states, masks.words, words, num_words, TILE=_WORDS_TILE, num_warps=4
        )


@triton.jit
def _publish_kernel(
    tokens_ptr, best_ptr, slots_ptr, index_ptr, owners_ptr, sampled_ptr, states_ptr, num,
    INDEX_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # program i: tile i of the rows
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num
    masked = tl.load(states_ptr + row, mask=inside, other=1) == 2
    best = tl.load(best_ptr + row, mask=masked, other=0.0)
    masked = masked & (tl.abs(best) < float("inf"))
    slot = tl.load(slots_ptr + row, mask=masked, other=0)
    owner = tl.load(owners_ptr + slot, mask=masked, other=0).to(tl.int64)
    index = tl.load(index_ptr + row, mask=masked, other=0)
    token = tl.load(tokens_ptr + row, mask=masked, other=0)
    tl.store(sampled_ptr + slot, (owner << (INDEX_BITS + TOKEN_BITS)) | (index << TOKEN_BITS) | token, mask=masked)


def publish_sampled(
    tokens: Tensor, best: Tensor, slots: Tensor, index: Tensor, masks: MaskTensors, states: Tensor
) -> None:
    """Stores the tokens that masked rows have sampled where the matcher reads them.

    tokens [rows] int64 and best [rows] float32 are of `sample_tokens`; a row whose best is not finite has no token.
    """
    rows = len(slots)
    for name, one in (("tokens", tokens), ("slots", slots), ("index", index)):
        check_tensor(name, one, (rows,), torch.int64)
    check_tensor("best", best, (rows,), torch.float32)
    check_tensor("states", states, (rows,), torch.int32)
    if rows:
        _publish_kernel[(ceil_div(rows, _TILE),)](
            tokens, best, slots, index, masks.owners, masks.sampled, states, rows,
            INDEX_BITS=INDEX_BITS, TOKEN_BITS=TOKEN_BITS, TILE=_TILE, num_warps=1,
        )  # fmt: skip
