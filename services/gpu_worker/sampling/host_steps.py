"""The host's implementation of the logits steps: `HOST_STEPS` change logits, `HOST_PARAMETERS` limit the choice.

A step keeps state only for the slots that use it; a step that no slot uses costs one look at a dict.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.sampling.metadata import SamplingMetadata
from blockyard.services.gpu_worker.sampling.user_processors import (
    ProcessorError,
    ProcessorThread,
    UserProcessor,
    load_processor,
)
from blockyard.services.gpu_worker.slots import Problem, Slots
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.shared.messages import Sampling


@dataclass(frozen=True, slots=True)
class StepResources:
    """What steps are made of."""

    vocab_size: int
    eos_token_ids: list[int]
    device: torch.device
    matchers: MatcherProcesses | None  # None: slots with a constraint cannot be sampled


@dataclass(frozen=True, slots=True)
class StoppedRows:
    """Rows that take no token in this step."""

    problems: dict[int, Problem] = field(default_factory=dict)  # by row: its slot fails
    waiting: set[int] = field(default_factory=set)  # their slots compute the same position again in the next step


class HostStep(Protocol):
    """A step that changes logits before a token is chosen."""

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        """Whether the slot uses this step. token_ids: its tokens so far."""

    def end(self, slot: int) -> None:
        """Drops the slot's state, if there is any."""

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        """Changes logits [rows, vocab] of these slots in place. Adds rows that cannot be sampled to `stopped`."""

    def on_sampled(self, slots: list[int], token_ids: list[int], table: Slots) -> None:
        """One new token of each slot, which is not in `table` yet. Rows that were stopped are left out."""


class LogitsProcessors(HostStep):
    """Calls the processors of users, before anything else: a mask wins over them."""

    def __init__(self, resources: StepResources) -> None:
        self._processors: dict[int, list[UserProcessor]] = {}  # by slot
        self._problems: dict[int, Problem] = {}  # of slots with a processor that cannot be loaded
        self._thread = ProcessorThread()

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        if not sampling.logits_processors:
            return False
        try:
            self._processors[slot] = [load_processor(one) for one in sampling.logits_processors]
        except ProcessorError as e:
            self._processors[slot], self._problems[slot] = [], Problem(str(e))
        return True

    def end(self, slot: int) -> None:
        self._processors.pop(slot, None)
        self._problems.pop(slot, None)

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        for row, slot in enumerate(slots) if self._processors else ():
            processors = self._processors.get(slot)
            if processors is None:
                continue
            if slot in self._problems:
                stopped.problems[row] = self._problems[slot]
                continue
            ids, begin = table.token_ids[slot, : table.num_tokens[slot]].tolist(), table.slots[slot].num_prompt_tokens
            try:
                logits[row] = self._thread.run(processors, ids[:begin], ids[begin:], logits[row])
            except ProcessorError as e:
                stopped.problems[row] = Problem(str(e))

    def on_sampled(self, slots: list[int], token_ids: list[int], table: Slots) -> None:
        """The next call gets the token from the table."""


class Constraint(HostStep):
    """Masks the tokens of structured output."""

    def __init__(self, resources: StepResources) -> None:
        self._matchers, self._device, self._vocab_size = resources.matchers, resources.device, resources.vocab_size
        self._slots: set[int] = set()

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        if sampling.constraint is None:
            return False
        self._slots.add(slot)
        return True

    def end(self, slot: int) -> None:
        self._slots.discard(slot)

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        if not self._slots:
            return
        rows = {slot: row for row, slot in enumerate(slots) if slot in self._slots}
        matchers = self._matchers
        if not rows or matchers is None:
            return
        wanted = {slot: int(table.num_tokens[slot]) for slot in rows}
        # on a GPU a wait would hold up the launches of later steps, and only rows of the host are here
        matchers.wait(wanted, has_others=len(rows) < len(slots) or self._device.type == "cuda")
        masks, places = [], []
        for slot, row in rows.items():
            if problem := matchers.problem(slot):
                stopped.problems[row] = problem
            elif (mask := matchers.mask(slot, wanted[slot])) is None:
                stopped.waiting.add(row)
            else:
                masks.append(mask)
                places.append(row)
        if masks:
            words = np.invert(np.stack(masks)).view(np.uint8)
            bits = np.unpackbits(words, axis=1, count=self._vocab_size, bitorder="little")
            banned = torch.from_numpy(bits.view(np.bool_)).to(self._device)
            if len(places) == len(slots):
                logits.masked_fill_(banned, float("-inf"))
            else:
                index = torch.tensor(places, device=self._device)
                logits[index] = logits[index].masked_fill_(banned, float("-inf"))

    def on_sampled(self, slots: list[int], token_ids: list[int], table: Slots) -> None:
        """Tells the matchers."""
        if self._slots and self._matchers is not None:
            sampled = zip(slots, token_ids, strict=True)
            self._matchers.sampled([(s, int(table.num_tokens[s]), t) for s, t in sampled if s in self._slots])


class AllowedTokens(HostStep):
    """Bans all tokens but `allowed_token_ids`."""

    def __init__(self, resources: StepResources) -> None:
        self._device = resources.device
        self._allowed: dict[int, Tensor] = {}  # by slot

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        if not sampling.allowed_token_ids or sampling.constraint is not None:  # it is in the mask
            return False
        self._allowed[slot] = torch.tensor(sampling.allowed_token_ids, device=self._device)
        return True

    def end(self, slot: int) -> None:
        self._allowed.pop(slot, None)

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        for row, slot in enumerate(slots) if self._allowed else ():
            allowed = self._allowed.get(slot)
            if allowed is not None:
                kept = logits[row, allowed]
                logits[row].fill_(float("-inf"))
                logits[row, allowed] = kept


class BadWords(HostStep):
    """Bans a token that would complete one of `bad_words` within the output; the prompt does not count, as in vLLM."""

    def __init__(self, resources: StepResources) -> None:
        self._words: dict[int, list[list[int]]] = {}  # by slot

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        if sampling.bad_words:
            self._words[slot] = sampling.bad_words
        return bool(sampling.bad_words)

    def end(self, slot: int) -> None:
        self._words.pop(slot, None)

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        if self._words:
            _ban(logits, [(r, i) for r, s in enumerate(slots) if s in self._words for i in self._completing(s, table)])

    def _completing(self, slot: int, table: Slots) -> list[int]:
        """Last tokens of words that the next token could complete."""
        first, end = table.slots[slot].num_prompt_tokens, int(table.num_tokens[slot])
        tokens = []
        for word in self._words[slot]:
            begin = end - len(word) + 1
            if len(word) == 1 or (begin >= first and table.token_ids[slot, begin:end].tolist() == word[:-1]):
                tokens.append(word[-1])
        return tokens


class MinTokens(HostStep):
    """Bans end-of-sequence and stop tokens until the output has `min_tokens` tokens."""

    def __init__(self, resources: StepResources) -> None:
        self._vocab_size, self._eos = resources.vocab_size, resources.eos_token_ids
        self._banned: dict[int, tuple[int, list[int]]] = {}  # by slot: below how many tokens, and which ids

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        ids = [i for i in {*self._eos, *sampling.stop_token_ids} if 0 <= i < self._vocab_size]
        if not sampling.min_tokens or not ids or sampling.constraint is not None:  # it is in the mask
            return False
        self._banned[slot] = num_prompt_tokens + sampling.min_tokens, ids
        return True

    def end(self, slot: int) -> None:
        self._banned.pop(slot, None)

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        banned = []
        for row, slot in enumerate(slots) if self._banned else ():
            end, ids = self._banned.get(slot, (0, []))
            if table.num_tokens[slot] < end:
                banned += [(row, token) for token in ids]
        _ban(logits, banned)


class LogitBias(HostStep):
    """Adds `logit_bias`."""

    def __init__(self, resources: StepResources) -> None:
        self._bias: dict[int, list[tuple[int, float]]] = {}  # by slot

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        if sampling.logit_bias:
            self._bias[slot] = sampling.logit_bias
        return bool(sampling.logit_bias)

    def end(self, slot: int) -> None:
        self._bias.pop(slot, None)

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        if not self._bias:
            return
        bias = [(row, *entry) for row, slot in enumerate(slots) for entry in self._bias.get(slot, ())]
        if bias:
            index = torch.tensor([(row, token) for row, token, _ in bias], device=logits.device)
            values = torch.tensor([value for *_, value in bias], dtype=logits.dtype, device=logits.device)
            logits.index_put_((index[:, 0], index[:, 1]), values, accumulate=True)


class Penalties(HostStep):
    """Repetition counts tokens of prompt and output; presence and frequency count the output alone, as in vLLM."""

    def __init__(self, resources: StepResources) -> None:
        device = self._device = resources.device
        vocab_size = resources.vocab_size
        self._rows: dict[int, int] = {}  # by slot
        self._free: list[int] = []
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._weights = torch.zeros((0, 3), dtype=torch.float32, device=device)  # repetition, presence, frequency

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        weights = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        if weights == (1.0, 0.0, 0.0):
            return False
        if not self._free:
            self._grow()
        row = self._rows[slot] = self._free.pop()
        ids = torch.from_numpy(token_ids).to(self._device)
        self._seen[row].fill_(False)
        self._seen[row, ids] = True
        self._counts[row] = torch.bincount(ids[num_prompt_tokens:], minlength=self._counts.shape[1])
        self._weights[row] = torch.tensor(weights, device=self._device)
        return True

    def end(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def apply(self, logits: Tensor, slots: list[int], table: Slots, stopped: StoppedRows) -> None:
        rows = self._rows_of(slots)
        if not rows:
            return
        index = torch.tensor(rows, device=self._device)
        places, mine = index[:, 0], index[:, 1]
        weights, counts = self._weights[mine], self._counts[mine]
        repeated = torch.where(self._seen[mine], weights[:, 0:1], 1.0)
        part = logits[places]
        part = torch.where(part > 0, part / repeated, part * repeated)
        part -= weights[:, 2:3] * counts
        part -= weights[:, 1:2] * (counts > 0)
        logits[places] = part

    def on_sampled(self, slots: list[int], token_ids: list[int], table: Slots) -> None:
        """Counts the tokens that were sampled."""
        rows = self._rows_of(slots)
        if not rows:
            return
        mine = torch.tensor([row for _, row in rows], device=self._device)
        tokens = torch.tensor([token_ids[place] for place, _ in rows], device=self._device)
        self._seen[mine, tokens] = True
        self._counts[mine, tokens] += 1

    def _rows_of(self, slots: list[int]) -> list[tuple[int, int]]:
        """Place in `slots` and row of the counts, of slots with penalties."""
        return [(i, self._rows[s]) for i, s in enumerate(slots) if s in self._rows] if self._rows else []

    def _grow(self) -> None:
        have = len(self._weights)
        more = max(have, 4)
        self._free += range(have, have + more)
        self._seen = torch.cat((self._seen, self._seen.new_zeros((more, self._seen.shape[1]))))
        self._counts = torch.cat((self._counts, self._counts.new_zeros((more, self._counts.shape[1]))))
        self._weights = torch.cat((self._weights, self._weights.new_zeros((more, 3))))


def _ban(logits: Tensor, entries: list[tuple[int, int]]) -> None:
    """entries: row and token id."""
    if entries:
        index = torch.tensor(entries, device=logits.device)
        logits[index[:, 0], index[:, 1]] = float("-inf")


HOST_STEPS: dict[str, Callable[[StepResources], HostStep]] = {
    "logits_processors": LogitsProcessors,
    "constraint": Constraint,
    "allowed_token_ids": AllowedTokens,
    "bad_words": BadWords,
    "min_tokens": MinTokens,
    "logit_bias": LogitBias,
    "penalties": Penalties,
}
# Parameters of the choice, which `Sampler` makes after the logits are changed.
HOST_PARAMETERS: dict[str, Callable[[SamplingMetadata, int, Sampling], None]] = {
    "temperature": SamplingMetadata.set_temperature,
    "min_p": SamplingMetadata.set_min_p,
    "top_k": SamplingMetadata.set_top_k,
    "top_p": SamplingMetadata.set_top_p,
}
