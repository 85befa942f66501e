"""Log-probabilities of prompts in steps that run ahead: the device computes them, and their plan's result has them.

A step that computes tokens of such a prompt keeps the hidden rows of all its tokens. Behind sampling, the logits of the
scored rows are computed a few rows at a time, and `gather_logprobs` reduces them to a few words a row. These are copied
to the host on a stream of their own, so the next step does not wait for the copy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.sampling.logprobs import MAX_LOGPROBS, LogprobsTensors
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.execution.device_ops import DeviceOps
from blockyard.services.gpu_worker.execution.pinned_ring import DeviceEvent
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.sampling.device_steps import LOGPROB_WORDS
from blockyard.services.gpu_worker.sampling.logprobs import ROWS_AT_ONCE
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import TokenLogprobs

ALIGNED = 16  # rows: kernels are compiled again for tensors at other alignments


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens of one prompt that get log-probabilities in a step."""

    slot: int
    row: int  # of the step without padding, whose logits are of the first of these tokens; the others follow
    position: int  # of the first of these tokens in the sequence
    token_ids: Ints
    num_top: int  # how many of the likeliest tokens are reported


@dataclass(frozen=True, slots=True)
class CopiedLogprobs:
    """The words of a step in host memory; they are there when the step is done."""

    prompts: list[ScoredPrompt]
    words: Tensor  # int32, see `_split`

    def by_slot(self) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """Position of the first token, and an entry for each token."""
        logprobs, ranks, top_ids, top_logprobs = (part.numpy() for part in _split(self.words))
        found, end = dict[int, tuple[int, list[TokenLogprobs]]](), 0
        for prompt in self.prompts:
            rows = slice(end, end := end + len(prompt.token_ids))
            columns = (
                prompt.token_ids.tolist(),
                logprobs[rows].tolist(),
                ranks[rows].tolist(),
                top_ids[rows, : prompt.num_top].tolist(),
                top_logprobs[rows, : prompt.num_top].tolist(),
            )
            found[prompt.slot] = prompt.position, [TokenLogprobs(*one) for one in zip(*columns, strict=True)]
        return found


class DevicePromptLogprobs:
    """Decides which rows of a step are scored, and computes their log-probabilities."""

    def __init__(self, model: Model, ops: DeviceOps, device: torch.device) -> None:
        self._model, self._ops, self._device = model, ops, device
        # `gather_logprobs` looks up a slot's number of tops: here rows of as many tops are one slot
        self._num_top = torch.arange(MAX_LOGPROBS + 1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def choose(self, num_top: dict[int, int], slots: Ints, counts: Ints, table: Slots) -> list[ScoredPrompt]:
        """What the next step scores, of `counts` tokens of each slot, decodes first. Call it before they are counted.

        num_top: `DeviceSlots.num_prompt_logprobs`; slots whose prompt is scored to its end are removed.
        """
        prompts: list[ScoredPrompt] = []
        for slot, place in [(s, p) for s in num_top for p in np.flatnonzero(slots == s).tolist()]:
            begin, end = int(table.num_computed[slot]), int(table.num_computed[slot] + counts[place])
            if positions := table.scored(slot, begin, end - begin):
                row = int(counts[:place].sum()) + positions.start - 1 - begin  # its logits are of the next token
                token_ids = table.token_ids[slot, positions.start : positions.stop].copy()
                prompts.append(ScoredPrompt(slot, row, positions.start, token_ids, num_top[slot]))
            if end + 1 >= table.slots[slot].num_prompt_tokens:
                del num_top[slot]
        return prompts

    def compute_rows(self, prompts: list[ScoredPrompt], hidden: Tensor, num_decodes: int, padding: int) -> Tensor:
        """Words of the scored rows on the device. hidden: of all tokens of the step, [tokens, hidden], where so many
        rows of padding follow those of decodes."""
        rows = _rows_of(prompts)
        rows[rows >= num_decodes] += padding
        return self._compute(prompts, rows, lambda some: self._model.logits(hidden.index_select(0, some)))

    def compute_logits(self, prompts: list[ScoredPrompt], logits: Tensor) -> Tensor:
        """Computes the rows of a step that has the logits [rows, vocab_size] of all its rows: see `compute_rows`."""
        return self._compute(prompts, _rows_of(prompts), lambda some: logits.index_select(0, some))

    def copy(self, prompts: list[ScoredPrompt], words: Tensor, done: DeviceEvent) -> CopiedLogprobs:
        """Copies the results to the host. Records `done` behind the copy and the work before it."""
        if self._stream is None:
            done.record()
            return CopiedLogprobs(prompts, words)
        copied = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied.copy_(words, non_blocking=True)
            done.record()
        words.record_stream(self._stream)
        return CopiedLogprobs(prompts, copied)

    def _compute(self, prompts: list[ScoredPrompt], places: Ints, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        num = len(places)
        aligned = -(-num // ALIGNED) * ALIGNED
        host = np.zeros((3, aligned), np.int64)
        host[0, :num] = places
        host[1, :num] = np.concatenate([prompt.token_ids for prompt in prompts])
        host[2, :num] = np.repeat([prompt.num_top for prompt in prompts], [len(one.token_ids) for one in prompts])
        rows, targets, num_top = self._to_device(torch.from_numpy(host))
        words = torch.empty(LOGPROB_WORDS * aligned, dtype=torch.int32, device=self._device)
        for start in range(0, num, ROWS_AT_ONCE):
            some = slice(start, min(start + ROWS_AT_ONCE, num))
            out = LogprobsTensors(*(part[some] for part in _split(words)))
            self._ops.gather_logprobs(logits_of(rows[some]), num_top[some], targets[some], self._num_top, out)
        return words

    def _to_device(self, values: Tensor) -> Tensor:
        if self._stream is None:
            return values
        return values.pin_memory().to(self._device, non_blocking=True)


def _rows_of(prompts: list[ScoredPrompt]) -> Ints:
    return np.concatenate([prompt.row + np.arange(len(prompt.token_ids)) for prompt in prompts])


def _split(words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `LogprobsTensors` in [LOGPROB_WORDS * rows] words, for all rows."""
    rows = len(words) // LOGPROB_WORDS
    logprobs, ranks, top_ids, top_logprobs = torch.split(words, [rows, rows, MAX_LOGPROBS * rows, MAX_LOGPROBS * rows])
    return (
        logprobs.view(torch.float32),
        ranks,
        top_ids.view(rows, MAX_LOGPROBS),
        top_logprobs.view(torch.float32).view(rows, MAX_LOGPROBS),
    )
