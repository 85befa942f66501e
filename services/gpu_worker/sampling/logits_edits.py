"""The rows of slots with changed logits, and the words of their lists of tokens, which sampling on the device reads.

A slot with changed logits has a row, with counts of its tokens and its adjusted logits; there is one for each
sequence of a step. The host samples a slot with parameters that the kernels do not support; it reads the logits of a
few such slots in each step.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.sampling.sampling_state import (
    MAX_LOGPROBS,
    AdjustedLogits,
    LogitsEdits,
    LogprobsTensors,
    count_known,
)
from blockyard.kernels.slots.slot_state import MAX_TOKEN_EDITS, Field, SlotState
from blockyard.services.gpu_worker.arrays import Ints, Words
from blockyard.services.gpu_worker.host_link import HostLink, put
from blockyard.services.gpu_worker.sampling.logits_steps import SlotFields, TokenEdits, write_steps
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import Sampling, TokenLogprobs

MOST_HOST_ROWS = 32  # slots with logits that the host reads in one step
LOGPROB_WORDS = 2 + 2 * MAX_LOGPROBS  # of a row


def edits_bytes(capacity: int, vocab_size: int) -> int:
    """Bytes of the rows of enabled `DeviceLogitsEdits`: they grow with the vocabulary."""
    return 8 * capacity * vocab_size


class DeviceLogitsEdits:
    """Owns the rows of slots with changed logits, and the buffer of a step's log-probabilities."""

    def __init__(
        self, state: SlotState, vocab_size: int, link: HostLink, enabled: bool, num_extra_tokens: int = 0
    ) -> None:
        """enabled: False leaves all penalties, edits of tokens and log-probabilities to the host. num_extra_tokens:
        that adapters may add behind the vocabulary: logits of some steps have columns for them."""
        device, capacity, self.enabled = state.arena.device, len(state.row_slots), enabled
        rows = capacity if enabled else 0
        width = vocab_size + num_extra_tokens
        self.tensors = LogitsEdits(
            row=state.fields[Field.EDITS_ROW],
            repetition=state.floats(Field.REPETITION),
            presence=state.floats(Field.PRESENCE),
            frequency=state.floats(Field.FREQUENCY),
            only_listed=state.fields[Field.ONLY_LISTED],
            num_listed=state.fields[Field.NUM_LISTED],
            listed=state.listed,
            bias=state.bias.view(torch.float32),
            until=state.until.view(torch.int64),
            counts=_zeros(rows, width, np.int32, device, link),
            logits=_zeros(rows, width, np.float32, device, link),
        )
        self.num_top = state.fields[Field.NUM_TOP]
        self.host_row = state.fields[Field.LOGITS_ROW]
        self.host_logits = _zeros(min(capacity, MOST_HOST_ROWS), width, np.float32, device, link)
        self._state, self._capacity, self._num_rows, self._vocab_size = state, capacity, rows, width
        self._link = link
        self.buffer = torch.zeros(LOGPROB_WORDS * capacity if enabled else 0, dtype=torch.int32, device=device)
        self.reset()

    def reset(self) -> None:
        self._rows: dict[int, int] = {}  # by slot
        self._free = list(range(self._num_rows))
        self.num_logprobs: dict[int, int] = {}  # by slot that reports log-probabilities: how many of the top tokens

    def adjusted(self, width: int) -> AdjustedLogits:
        """The adjusted logits of a step with logits [rows, width]."""
        return AdjustedLogits(self.tensors.row, self.tensors.logits[:, :width])

    def needs_processing(self, slots: Ints) -> bool:
        """Whether any of these slots changes logits or reports log-probabilities."""
        return bool(self._rows or self.num_logprobs) and any(
            s in self._rows or s in self.num_logprobs for s in slots.tolist()
        )

    def end(self, slot: int) -> None:
        self.num_logprobs.pop(slot, None)
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def start(
        self,
        slot: int,
        sampling: Sampling,
        table: Slots,
        end_ids: list[int],
        words: list[int],
        needs_host: bool,
        mask_owner: int = 0,
    ) -> TokenEdits | None:
        """Writes the slot's words and returns its edits of tokens. None: the host samples it. Its ids are in `table`.

        needs_host: it cannot run ahead in any case. mask_owner: of its masks, 0: the device has none.
        """
        state = SlotFields(words, table.slots[slot].num_prompt_tokens, end_ids, self._vocab_size, mask_owner)
        on_device = write_steps(state, sampling)
        words[Field.EDITS_ROW] = words[Field.NUM_TOP] = words[Field.LOGITS_ROW] = -1
        num_logprobs = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        changes = bool(state.edits) or state.has_penalties or mask_owner != 0
        if (
            needs_host
            or not on_device
            or num_logprobs > MAX_LOGPROBS
            or (num_logprobs >= 0 and not self.enabled)
            or len(state.edits) > MAX_TOKEN_EDITS
            or (changes and not self._free)
        ):
            return None
        if changes:
            words[Field.EDITS_ROW] = self._rows[slot] = self._free.pop()
            self.recount(slot, table)
        if num_logprobs >= 0:
            words[Field.NUM_TOP] = self.num_logprobs[slot] = num_logprobs
        words[Field.ONLY_LISTED], words[Field.NUM_LISTED] = state.only_listed, len(state.edits)
        words[Field.MASK_OWNER] = mask_owner
        return state.edits

    def recount(self, slot: int, table: Slots) -> None:
        """Counts the tokens of a slot again, if it has a row."""
        row = self._rows.get(slot)
        if row is None:
            return
        state = table.slots[slot]
        counts = self.tensors.counts
        ids = put(table.token_ids[slot, state.num_virtual : table.num_tokens[slot]].copy(), counts.device, self._link)
        count_known(counts[row], ids, state.num_prompt_tokens - state.num_virtual)

    def edit_words(self, slot: int, edits: TokenEdits) -> tuple[Words, Words]:
        """Index and value of the words of a slot's edits."""
        state, count = self._state, len(edits)
        at = np.arange(count)
        index = np.concatenate(
            [
                state.offset(state.listed) + slot * MAX_TOKEN_EDITS + at,
                state.offset(state.bias) + slot * MAX_TOKEN_EDITS + at,
                state.offset(state.until) + slot * 2 * MAX_TOKEN_EDITS + np.arange(2 * count),
            ]
        )
        values = (
            np.array(list(edits), np.int32),
            np.array([bias for bias, _ in edits.values()], np.float32).view(np.int32),
            np.array([until for _, until in edits.values()], np.int64).view(np.int32),
        )
        return index.astype(np.int32), np.concatenate(values)

    def logprob_buffers(self, rows: int) -> LogprobsTensors:
        """The buffers that a step of so many rows writes."""
        cap, most = self._capacity, MAX_LOGPROBS
        parts = torch.split(self.buffer, [cap, cap, most * cap, most * cap])
        return LogprobsTensors(
            parts[0][:rows].view(torch.float32),
            parts[1][:rows],
            parts[2][: most * rows].view(rows, most),
            parts[3][: most * rows].view(torch.float32).view(rows, most),
        )

    def read_logprobs(self, words: Words, place: int, token: int, num_top: int) -> TokenLogprobs:
        """Log-probabilities of a row, from the host's copy of `buffer`."""
        cap, most = self._capacity, MAX_LOGPROBS
        floats, start = words.view(np.float32), 2 * cap + place * most
        top = slice(start, start + num_top)
        logs = slice(start + most * cap, start + most * cap + num_top)
        rank = int(words[cap + place])
        return TokenLogprobs(token, float(floats[place]), rank, words[top].tolist(), floats[logs].tolist())


def _zeros(rows: int, columns: int, dtype: type[np.number[Any]], device: torch.device, link: HostLink) -> Tensor:
    """In host memory pages of rows that are never used take no memory."""
    if not link.copies:
        return torch.from_numpy(np.zeros((rows, columns), dtype))
    return torch.zeros((rows, columns), dtype=torch.float32 if dtype is np.float32 else torch.int32, device=device)
