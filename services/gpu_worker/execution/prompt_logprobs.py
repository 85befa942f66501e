"""Log-probabilities of prompts: the device computes them, and the result of their plan has them.

A step that computes tokens of such a prompt keeps the hidden rows of all its tokens. Behind sampling, the logits of the
scored rows are computed a few rows at a time and reduced to a few words a row: by `gather_logprobs`, or by torch on the
CPU and where a request asks for more of the likeliest tokens than that kernel finds. On a GPU the words are copied to
the host on a stream of their own, so the next step does not wait for the copy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.sampling.sampling_state import MAX_LOGPROBS, LogprobsTensors
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.host_link import DeviceEvent, put
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.slots import Slots, StepRows
from blockyard.shared.messages import TokenLogprobs

ROWS_AT_ONCE = 256  # bounds the logits in memory
ALIGNED = 16  # rows: kernels are compiled again for tensors at other alignments
MANY_ROWS_AT_ONCE = 64  # with more top tokens: torch needs several copies of the logits

LogitsOf = Callable[[Tensor], Tensor]  # rows of the step -> logits
Score = Callable[[Tensor, Tensor, Tensor, LogprobsTensors], None]  # of logits, tokens, number of top tokens
# of logits, slots, tokens, number of top tokens by slot: see `kernels.sampling.logprobs.gather_logprobs`
GatherLogprobs = Callable[[Tensor, Tensor, Tensor, Tensor, LogprobsTensors], None]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens of one prompt that get log-probabilities in a step."""

    slot: int
    row: int  # of the step without padding, whose logits are of the first of these tokens; the others follow
    position: int  # of the first of these tokens in the sequence
    token_ids: Ints
    num_top: int  # how many of the likeliest tokens are reported


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Log-probabilities of some prompts of a step, on the device or in host memory."""

    prompts: list[ScoredPrompt]
    width: int  # likeliest tokens of each row
    words: Tensor  # int32, see `_split`

    def entries(self) -> Iterator[tuple[ScoredPrompt, list[TokenLogprobs]]]:
        """An entry for each token, from words in host memory."""
        logprobs, ranks, top_ids, top_logprobs = (part.numpy() for part in _split(self.words, self.width))
        end = 0
        for prompt in self.prompts:
            rows = slice(end, end := end + len(prompt.token_ids))
            columns = (
                prompt.token_ids.tolist(),
                logprobs[rows].tolist(),
                ranks[rows].tolist(),
                top_ids[rows, : prompt.num_top].tolist(),
                top_logprobs[rows, : prompt.num_top].tolist(),
            )
            yield prompt, [TokenLogprobs(*one) for one in zip(*columns, strict=True)]


def entries_by_slot(scored: Sequence[ScoredRows]) -> dict[int, tuple[int, list[TokenLogprobs]]]:
    """Position of the first token, and an entry for each token."""
    return {prompt.slot: (prompt.position, entries) for rows in scored for prompt, entries in rows.entries()}


def choose_prompts(num_top: dict[int, int], step: StepRows, table: Slots) -> list[ScoredPrompt]:
    """What the next step scores. Call it before its tokens are counted.

    num_top: `DeviceSlots.num_prompt_logprobs`; slots whose prompt is scored to its end are removed.
    """
    prompts: list[ScoredPrompt] = []
    for slot, place in [(s, p) for s in num_top for p in np.flatnonzero(step.slots == s).tolist()]:
        begin, end = int(table.num_computed[slot]), int(table.num_computed[slot] + step.counts[place])
        if positions := table.scored(slot, begin, end - begin):
            row = int(step.counts[:place].sum()) + positions.start - 1 - begin  # its logits are of the next token
            token_ids = table.token_ids[slot, positions.start : positions.stop].copy()
            prompts.append(ScoredPrompt(slot, row, positions.start, token_ids, num_top[slot]))
        if end + 1 >= table.slots[slot].num_prompt_tokens:
            del num_top[slot]
    return prompts


class DevicePromptLogprobs:
    """Computes the log-probabilities of the rows of a step that `choose_prompts` has found."""

    def __init__(self, model: Model, gather: GatherLogprobs | None, device: torch.device) -> None:
        """gather: finds up to MAX_LOGPROBS of the likeliest tokens; None: torch finds any number."""
        self._model, self._gather, self._device = model, gather, device
        self._most_gathered = MAX_LOGPROBS if gather is not None else -1
        # `gather_logprobs` looks up a slot's number of tops: here rows of as many tops are one slot
        self._num_top = torch.arange(MAX_LOGPROBS + 1, dtype=torch.int32, device=device)
        self._link = model.table.link
        self._stream = self._link.stream()

    def compute_rows(
        self, prompts: list[ScoredPrompt], hidden: Tensor, num_decodes: int, padding: int
    ) -> list[ScoredRows]:
        """The scored rows on the device. hidden: of all tokens of the step, [tokens, hidden], where so many rows of
        padding follow those of decodes."""

        def logits_of(rows: Tensor) -> Tensor:
            with self._model.adapter_rows.only(rows):
                return self._model.logits(hidden.index_select(0, rows))

        return self._compute(prompts, logits_of, num_decodes, padding)

    def compute_logits(self, prompts: list[ScoredPrompt], logits: Tensor) -> list[ScoredRows]:
        """Computes the rows of a step that has the logits [rows, vocab_size] of all its rows: see `compute_rows`."""
        return self._compute(prompts, lambda rows: logits.index_select(0, rows))

    def copy(self, scored: Sequence[ScoredRows], done: DeviceEvent) -> Sequence[ScoredRows]:
        """Copies rows to the host. Records `done` behind the copy and the work before it."""
        if not self._link.copies or not scored:
            done.record()
            return scored
        self._stream.follow_steps()
        with self._stream.use():
            copied = [replace(rows, words=self._to_host(rows.words)) for rows in scored]
            done.record()
        for rows in scored:
            self._stream.keep(rows.words)
        return copied

    def _compute(
        self, prompts: list[ScoredPrompt], logits_of: LogitsOf, num_decodes: int = 0, padding: int = 0
    ) -> list[ScoredRows]:
        few = [prompt for prompt in prompts if prompt.num_top <= self._most_gathered]
        many = [prompt for prompt in prompts if prompt.num_top > self._most_gathered]
        scored, most_top = [], max((prompt.num_top for prompt in many), default=0)
        for some, score, width in ((few, self._score_few, MAX_LOGPROBS), (many, _score_many, most_top)):
            if some:
                rows = _rows_of(some)
                rows[rows >= num_decodes] += padding
                scored.append(ScoredRows(some, width, self._compute_words(some, rows, width, logits_of, score)))
        return scored

    def _compute_words(
        self, prompts: list[ScoredPrompt], places: Ints, width: int, logits_of: LogitsOf, score: Score
    ) -> Tensor:
        num = len(places)
        aligned = -(-num // ALIGNED) * ALIGNED
        host = np.zeros((3, aligned), np.int64)
        host[0, :num] = places
        host[1, :num] = np.concatenate([prompt.token_ids for prompt in prompts])
        host[2, :num] = np.repeat([prompt.num_top for prompt in prompts], [len(one.token_ids) for one in prompts])
        rows, targets, num_top = put(host, self._device, self._link)
        words = torch.empty((2 + 2 * width) * aligned, dtype=torch.int32, device=self._device)
        at_once = ROWS_AT_ONCE if width <= MAX_LOGPROBS else MANY_ROWS_AT_ONCE
        for start in range(0, num, at_once):
            part = slice(start, min(start + at_once, num))
            out = LogprobsTensors(*(field[part] for field in _split(words, width)))
            score(logits_of(rows[part]), targets[part], num_top[part], out)
        return words

    def _score_few(self, logits: Tensor, targets: Tensor, num_top: Tensor, out: LogprobsTensors) -> None:
        assert self._gather is not None
        self._gather(logits, num_top, targets, self._num_top, out)

    def _to_host(self, words: Tensor) -> Tensor:
        return self._link.host_tensor(words.shape, words.dtype).copy_(words, non_blocking=True)


def _rows_of(prompts: list[ScoredPrompt]) -> Ints:
    return np.concatenate([prompt.row + np.arange(len(prompt.token_ids)) for prompt in prompts])


def _score_many(logits: Tensor, targets: Tensor, num_top: Tensor, out: LogprobsTensors) -> None:
    """Computes `gather_logprobs` in torch, for more of the likeliest tokens than the kernel finds."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])
    out.logprob.copy_(chosen[:, 0])
    out.rank.copy_((logprobs > chosen).sum(-1).add_(1))
    top = logprobs.topk(out.top_ids.shape[1], dim=-1)
    out.top_ids.copy_(top.indices)
    out.top_logprobs.copy_(top.values)


def _split(words: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `LogprobsTensors` in [(2 + 2 * width) * rows] words, for all rows."""
    rows = len(words) // (2 + 2 * width)
    logprobs, ranks, top_ids, top_logprobs = torch.split(words, [rows, rows, width * rows, width * rows])
    return (
        logprobs.view(torch.float32),
        ranks,
        top_ids.view(rows, width),
        top_logprobs.view(torch.float32).view(rows, width),
    )
