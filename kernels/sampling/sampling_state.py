"""Tensors that sampling reads and writes: parameters, edits of logits, masks, log-probabilities. Imports no Triton."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.tensor_checks import check_tensor

SEEN = 1 << 30  # bit of a count: the token is in the prompt; the bits below count it in the output
TOKEN_BITS, INDEX_BITS, OWNER_BITS = 20, 22, 21  # of a record of a sampled token, which is one store of 64 bits
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of slots on the device; all contiguous, [num_slots] but for `key`."""

    temperature: Tensor  # float32; below 1e-5: greedy
    top_k: Tensor  # int32, from 1; the vocabulary's size or more: no limit
    top_p: Tensor  # float32, 1: no limit
    min_p: Tensor  # float32, 0: no limit
    key: Tensor  # [2, num_slots] int32 or int64, the two words of the request's seed
    choice: Tensor  # int32

    def check(self) -> None:
        """Raises ValueError."""
        num = self.temperature.shape[0]
        for name, dtype in (("temperature", torch.float32), ("top_p", torch.float32), ("min_p", torch.float32)):
            check_tensor(name, getattr(self, name), (num,), dtype)
        check_tensor("top_k", self.top_k, (num,), torch.int32)
        check_tensor("choice", self.choice, (num,), torch.int32)
        check_tensor("key", self.key, (2, num), torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class AdjustedLogits:
    """Logits that replace the raw ones, for the slots that have such a row (see `penalize_logits`)."""

    row: Tensor  # [num_slots] int32; below 0: none
    logits: Tensor  # [adjusted rows, vocab] float32, rows may be strided


class MaskState(IntEnum):
    """Whether a row of a step is ready to sample."""

    MISSING = 0  # its mask did not come in time: the row waits
    FREE = 1  # its slot has no constraint, or samples no token in this step
    MASKED = 2  # its mask is there


@dataclass(frozen=True, slots=True)
class MaskTensors:
    """Masks of slots; all contiguous. `owners` and `late` are on the device, the others are in pinned host memory."""

    owners: Tensor  # [num_slots] int32, from 1 to 2 ** OWNER_BITS - 1; 0: the slot has no constraint
    late: Tensor  # [num_slots] int32, not 0: the last `wait_for_masks` of the slot found no mask
    words: Tensor  # [num_slots, 2, ceil(vocab / 32)] int32: bit i % 32 of word i // 32 allows token i
    tags: Tensor  # [num_slots, 2] int64: owner << 32 | index
    sampled: Tensor  # [num_slots] int64: owner << 42 | index << 20 | the token at that index

    def check(self, vocab: int) -> None:
        """Raises ValueError."""
        num = self.owners.shape[0]
        check_tensor("owners", self.owners, (num,), torch.int32)
        check_tensor("late", self.late, (num,), torch.int32)
        check_tensor("words", self.words, (num, 2, ceil_div(vocab, 32)), torch.int32)
        check_tensor("tags", self.tags, (num, 2), torch.int64)
        check_tensor("sampled", self.sampled, (num,), torch.int64)


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """Logits edits of slots on the device; all contiguous. The `listed` tokens of a slot are distinct."""

    row: Tensor  # [num_slots] int32: row of `counts` and `logits`, each of one slot; below 0: no edits
    repetition: Tensor  # [num_slots] float32, 1: none
    presence: Tensor  # [num_slots] float32
    frequency: Tensor  # [num_slots] float32
    only_listed: Tensor  # [num_slots] int32, not 0: only listed tokens are allowed
    num_listed: Tensor  # [num_slots] int32, at most `most`
    listed: Tensor  # [num_slots, most] int32 token ids
    bias: Tensor  # [num_slots, most] float32, added to the listed tokens' logits; -inf bans
    until: Tensor  # [num_slots, most] int64: banned while the new token's index is below
    counts: Tensor  # [rows, vocab or more] int32: see SEEN
    logits: Tensor  # [rows, as many] float32, the adjusted logits of the last call

    def check(self, vocab: int) -> None:
        """Raises ValueError."""
        num, most = self.listed.shape
        if self.counts.shape[1] < vocab:
            raise ValueError(f"counts are of {self.counts.shape[1]} tokens, logits of {vocab}")
        whole = {"row": torch.int32, "only_listed": torch.int32, "num_listed": torch.int32}
        one = {"repetition": torch.float32, "presence": torch.float32, "frequency": torch.float32}
        for name, dtype in (whole | one).items():
            check_tensor(name, getattr(self, name), (num,), dtype)
        for name, dtype in {"listed": torch.int32, "bias": torch.float32, "until": torch.int64}.items():
            check_tensor(name, getattr(self, name), (num, most), dtype)
        for name, dtype in {"counts": torch.int32, "logits": torch.float32}.items():
            check_tensor(name, getattr(self, name), tuple(self.counts.shape), dtype)


def make_logits_edits(num_slots: int, num_rows: int, most: int, vocab: int, device: torch.device) -> LogitsEdits:
    """Edits of no slot. `most`: how many tokens a slot can list, a power of 2."""

    def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    i32, f32 = torch.int32, torch.float32
    return LogitsEdits(
        row=full(-1, i32, num_slots),
        repetition=full(1, f32, num_slots),
        presence=full(0, f32, num_slots),
        frequency=full(0, f32, num_slots),
        only_listed=full(0, i32, num_slots),
        num_listed=full(0, i32, num_slots),
        listed=full(0, i32, num_slots, most),
        bias=full(0, f32, num_slots, most),
        until=full(0, torch.int64, num_slots, most),
        counts=full(0, i32, num_rows, vocab),
        logits=full(0, f32, num_rows, vocab),
    )


def count_known(counts: Tensor, token_ids: Tensor, num_prompt_tokens: int) -> None:
    """Resets a slot's row of counts [vocab] int32 to token_ids [n] int64: all its tokens, the prompt first."""
    output = token_ids[num_prompt_tokens:]
    counts.zero_()
    counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
    counts[token_ids[:num_prompt_tokens]] |= SEEN


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of a step's rows."""

    masks: MaskTensors
    states: Tensor  # [rows] int32, see MaskState
    words: Tensor  # [rows, ceil(vocab / 32)] int32, of rows with MaskState.MASKED
    vocab_size: int  # masks allow no token behind it

    def first(self, rows: int) -> "RowMasks":
        return RowMasks(self.masks, self.states[:rows], self.words[:rows], self.vocab_size)


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Outputs of `gather_logprobs`, for rows of slots that ask for log-probabilities; all contiguous."""

    logprob: Tensor  # [rows] float32, of the sampled token
    rank: Tensor  # [rows] int32, 1 is the likeliest; ties share the best rank
    top_ids: Tensor  # [rows, at most MAX_LOGPROBS] int32, likeliest first, among ties the lowest; the rest is unset
    top_logprobs: Tensor  # as top_ids, float32
