"""What slots ask for beside a draw, on the device: penalties, tokens favoured or forbidden, log-probabilities.

A slot that changes its logits has one of a few rows, of counts of its tokens and of adjusted logits. What does not fit
a list, and bans of several tokens in a row, is the host's.
"""

import math
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from blockyard.kernels.sampling.logprobs import MAX_LOGPROBS, LogprobsTensors
from blockyard.kernels.sampling.penalize_logits import LogitsEdits, count_known
from blockyard.kernels.sampling.sample_tokens import AdjustedLogits
from blockyard.kernels.slots.slot_state import MAX_TOKEN_EDITS, Field, SlotState
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import Sampling, TokenLogprobs

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

MOST_ROWS = 64  # slots that change their logits at a time; one takes 8 bytes for each token of the vocabulary
LOGPROB_WORDS = 2 + 2 * MAX_LOGPROBS  # of a row


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """Tokens that a slot favours or forbids."""

    only: bool  # all others are forbidden
    ids: list[int]
    bias: list[float]
    until: list[int]  # forbidden as long as the new token's index is below


def biases_of(sampling: Sampling, num_prompt: int, endings: list[int]) -> TokenBiases:
    """In the sampler's order: what is forbidden stays so whatever its bias."""
    only = bool(sampling.allowed_token_ids)
    entries: dict[int, tuple[float, int]] = dict.fromkeys(sampling.allowed_token_ids, (0.0, 0))
    for token, bias in sampling.logit_bias:
        if not only or token in entries:
            entries[token] = (entries.get(token, (0.0, 0))[0] + bias, 0)
    for words in sampling.bad_words:
        entries[words[0]] = (-math.inf, 0)
    if sampling.min_tokens:
        for token in endings:
            if not only or token in entries:
                entries[token] = (entries.get(token, (0.0, 0))[0], num_prompt + sampling.min_tokens)
    return TokenBiases(only, list(entries), [b for b, _ in entries.values()], [u for _, u in entries.values()])


def needs_host(sampling: Sampling) -> bool:
    """Whether there is something that the device does not do, whatever room there is."""
    return (
        sampling.num_prompt_logprobs is not None
        or (sampling.num_logprobs or 0) > MAX_LOGPROBS
        or any(len(words) > 1 for words in sampling.bad_words)
    )


class DeviceLogitsEdits:
    """The rows, who has them, and what a step's log-probabilities are read from."""

    def __init__(self, state: SlotState, capacity: int, vocab_size: int, enabled: bool) -> None:
        """Not enabled: whatever slots ask for is the host's."""
        device, self.enabled = state.arena.device, enabled
        rows = min(capacity, MOST_ROWS) if enabled else 0
        counts = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)
        self.logits_edits = LogitsEdits(
            row=state.fields[Field.EDITS_ROW],
            repetition=state.floats(Field.REPETITION),
            presence=state.floats(Field.PRESENCE),
            frequency=state.floats(Field.FREQUENCY),
            only_listed=state.fields[Field.ONLY_LISTED],
            num_listed=state.fields[Field.NUM_LISTED],
            listed=state.listed,
            bias=state.bias.view(torch.float32),
            until=state.until.view(torch.int64),
            counts=counts,
            logits=torch.zeros((rows, vocab_size), dtype=torch.float32, device=device),
        )
        self.adjusted = AdjustedLogits(self.logits_edits.row, self.logits_edits.logits)
        self.num_top = state.fields[Field.NUM_TOP]
        self._state, self._capacity, self._num_rows = state, capacity, rows
        self.buffer = torch.zeros(LOGPROB_WORDS * capacity if enabled else 0, dtype=torch.int32, device=device)
        self.reset()

    def reset(self) -> None:
        self._rows: dict[int, int] = {}  # by slot
        self._free = list(range(self._num_rows))
        self.num_logprobs: dict[int, int] = {}  # slots that ask for log-probabilities, and how many of the likeliest

    def needs_processing(self, slots: Ints) -> bool:
        """Whether any of these asks for anything."""
        return bool(self._rows or self.num_logprobs) and any(
            s in self._rows or s in self.num_logprobs for s in slots.tolist()
        )

    def end(self, slot: int) -> None:
        self.num_logprobs.pop(slot, None)
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def start(self, slot: int, sampling: Sampling, table: Slots, endings: list[int]) -> "SlotEdits | None":
        """What is to be written of a slot; None if the host has to look after it. Its ids are in `table`."""
        num_prompt = table.slots[slot].num_prompt_tokens
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        listed = biases_of(sampling, num_prompt, endings)
        changes = bool(listed.ids) or penalties != (1.0, 0.0, 0.0)
        if needs_host(sampling) or len(listed.ids) > MAX_TOKEN_EDITS or (changes and not self._free):
            return None
        if sampling.num_logprobs is not None and not self.enabled:
            return None
        row = -1
        if changes:
            row = self._rows[slot] = self._free.pop()
            self.count(slot, table)
        num_top = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        if num_top >= 0:
            self.num_logprobs[slot] = num_top
        return SlotEdits(row, penalties, listed, num_top)

    def count(self, slot: int, table: Slots) -> None:
        """Counts all that is known of a slot anew, if it has a row."""
        row = self._rows.get(slot)
        if row is None:
            return
        ids = torch.from_numpy(table.token_ids[slot, : table.num_tokens[slot]].copy())
        counts = self.logits_edits.counts
        if counts.is_cuda:
            ids = ids.pin_memory().to(counts.device, non_blocking=True)
        count_known(counts[row], ids, table.slots[slot].num_prompt_tokens)

    def has_row(self, slot: int) -> bool:
        return slot in self._rows

    def places(self, slot: int, listed: TokenBiases) -> tuple[Words, Words]:
        """Index and value of the words of a list."""
        state, count = self._state, len(listed.ids)
        at = np.arange(count)
        index = np.concatenate(
            [
                state.place(state.listed) + slot * MAX_TOKEN_EDITS + at,
                state.place(state.bias) + slot * MAX_TOKEN_EDITS + at,
                state.place(state.until) + slot * 2 * MAX_TOKEN_EDITS + np.arange(2 * count),
            ]
        )
        values = (
            np.array(listed.ids, np.int32),
            np.array(listed.bias, np.float32).view(np.int32),
            np.array(listed.until, np.int64).view(np.int32),
        )
        return index.astype(np.int32), np.concatenate(values)

    def logprob_buffers(self, rows: int) -> LogprobsTensors:
        """What a step of so many rows writes."""
        cap, most = self._capacity, MAX_LOGPROBS
        parts = torch.split(self.buffer, [cap, cap, most * cap, most * cap])
        return LogprobsTensors(
            parts[0][:rows].view(torch.float32),
            parts[1][:rows],
            parts[2][: most * rows].view(rows, most),
            parts[3][: most * rows].view(torch.float32).view(rows, most),
        )

    def read(self, words: Words, place: int, token: int, num_top: int) -> TokenLogprobs:
        """Of a row, from the host's copy of `buffer`."""
        cap, most = self._capacity, MAX_LOGPROBS
        floats, start = words.view(np.float32), 2 * cap + place * most
        top = slice(start, start + num_top)
        logs = slice(start + most * cap, start + most * cap + num_top)
        rank = int(words[cap + place])
        return TokenLogprobs(token, float(floats[place]), rank, words[top].tolist(), floats[logs].tolist())


@dataclass(frozen=True, slots=True)
class SlotEdits:
    """Of a slot that starts."""

    row: int
    penalties: tuple[float, float, float]
    listed: TokenBiases
    num_top: int

    def put(self, words: list[int]) -> None:
        """Into the words of the slot's fields."""
        words[Field.EDITS_ROW], words[Field.NUM_TOP] = self.row, self.num_top
        words[Field.ONLY_LISTED], words[Field.NUM_LISTED] = self.listed.only, len(self.listed.ids)
        words[Field.REPETITION], words[Field.PRESENCE], words[Field.FREQUENCY] = float_words(*self.penalties)


def float_words(*values: float) -> list[int]:
    """The bits of each as a float32."""
    return array("i", array("f", values).tobytes()).tolist()
