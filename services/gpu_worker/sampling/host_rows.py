"""Samples rows on the host, for what no kernel supports: processors of users, bad words of several tokens, long lists.

The steps of `logits_steps` apply in their order, row by row: a processor of a user may do anything with its row, and
there are few such slots. `LogprobsMode` is what a row reports beside a token; all modes but the first need the host.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.sampling.philox_gumbel import split_seed
from blockyard.kernels.slots.slot_state import NUM_FIELDS, Field
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.host_link import LinkStream
from blockyard.services.gpu_worker.sampling.logits_steps import SlotFields, write_steps
from blockyard.services.gpu_worker.sampling.logprobs import score, score_listed
from blockyard.services.gpu_worker.sampling.topk_topp_sampler import NoisyRows, noisy_rows, processed
from blockyard.services.gpu_worker.sampling.user_processors import (
    ProcessorError,
    ProcessorThread,
    UserProcessor,
    load_processor,
)
from blockyard.services.gpu_worker.slots import NONE_ALLOWED, NOT_FINITE, Problem, Slot, Slots
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.shared.config.services.worker import LogprobsMode
from blockyard.shared.messages import Sampling, TokenLogprobs


@dataclass(slots=True)
class Sampled:
    """A token for each row. The token of a row that waits or has a problem is invalid."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row
    problems: dict[int, Problem] = field(default_factory=dict)  # by row: its slot fails
    waiting: set[int] = field(default_factory=set)  # rows without a token: they compute their position again


@dataclass(slots=True)
class HostRow:
    """What a slot's parameters ask for."""

    owner: int
    edits: SlotFields
    words: list[list[int]]  # bad words of several tokens
    noisy: list[NoisyRows]  # one with a temperature, none without
    processors: list[UserProcessor] = field(default_factory=list)
    problem: Problem | None = None  # of a processor that cannot be loaded

    @classmethod
    def of(cls, owner: int, state: Slot, eos_token_ids: list[int], vocab_size: int, device: torch.device) -> "HostRow":
        sampling = state.sampling
        ends = [i for i in {*eos_token_ids, *state.stop_ids} if 0 <= i < state.vocab_size]
        masked = int(sampling.constraint is not None)  # its mask has the allowed tokens and the least number of tokens
        edits = SlotFields([0] * NUM_FIELDS, state.num_prompt_tokens, ends, vocab_size, masked)
        write_steps(edits, sampling)
        edits.words[Field.KEY : Field.KEY + 2], edits.words[Field.CHOICE] = split_seed(sampling.seed), state.choice
        fields = np.array(edits.words, np.int64).astype(np.int32)[:, None]
        noisy = noisy_rows(fields, np.ones(1, np.bool_), vocab_size, device)
        row = cls(owner, edits, [word for word in sampling.bad_words if len(word) > 1], noisy)
        try:
            row.processors = [load_processor(one, sampling.extra_args) for one in sampling.logits_processors]
        except ProcessorError as e:
            row.problem = Problem(str(e))
        return row

    def processed(self, x: Tensor, as_logits: bool) -> Tensor:
        """x [vocab]: adjusted logits -> [vocab]: see `topk_topp_sampler.processed`."""
        if not self.noisy:
            return x.clone() if as_logits else x.log_softmax(-1)
        noisy = self.noisy[0]
        return processed(x[None], noisy.temperature[:, 0], noisy.limits, as_logits)[0]

    def choose(self, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """The winner's score and its token, [1] each. x [vocab]: adjusted logits. index: of the token to choose."""
        if not self.noisy:
            return x[None].max(dim=-1)
        return self.noisy[0].sample(x[None], torch.tensor([index], device=x.device))


class HostRows:
    """Keeps the state of the slots that it samples, until they end."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        matchers: MatcherProcesses | None,
        stream: LinkStream,
        runs_ahead: bool,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        """device: of the logits. matchers: make the masks of structured output; None: no slot has a constraint.

        stream: that `sample` is called on. runs_ahead: later steps are launched beside it, which it must not hold up.
        """
        self._vocab_size, self._eos, self._device = vocab_size, eos_token_ids, device
        self._is_raw = mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS)
        self._as_logits = mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)
        self._matchers = matchers
        self._rows: dict[int, HostRow] = {}  # by slot
        self._runs_ahead, self._thread = runs_ahead, ProcessorThread(stream)

    def reset(self) -> None:
        self._rows.clear()

    def end(self, slot: int) -> None:
        """Drops the slot's state, if there is any."""
        self._rows.pop(slot, None)

    def sample(self, logits: Tensor, slots: Ints, table: Slots) -> Sampled:
        """logits [rows, vocab or more] float32 of these slots; may be written to."""
        sampled = Sampled([0] * len(slots))
        masks = self._masks(slots.tolist(), table, sampled)
        chosen: list[tuple[Tensor, Tensor]] = []
        rows: list[tuple[int, Tensor, Tensor | None]] = []  # place, logits, reported values
        for place, slot in enumerate(slots.tolist()):
            if place in sampled.waiting or place in sampled.problems:
                continue
            reports, row = table.slots[slot].sampling.num_logprobs is not None, self._row_of(slot, table)
            own = logits[place, : table.slots[slot].vocab_size]  # others' adapters may have added tokens
            shown: Tensor | None = None
            if reports and self._is_raw:
                shown = own.clone() if self._as_logits else own.log_softmax(-1)
            try:
                x = self._adjusted(own, row, slot, table, masks.get(place))
            except ProcessorError as e:
                sampled.problems[place] = Problem(str(e))
                continue
            chosen.append(row.choose(x, int(table.num_tokens[slot])))
            if reports and not self._is_raw:
                shown = row.processed(x, self._as_logits)
            rows.append((place, x, shown))
        if rows:
            values, tokens = (torch.cat(column).tolist() for column in zip(*chosen, strict=True))
            for (place, x, shown), value, token in zip(rows, values, tokens, strict=True):
                sampled.token_ids[place] = token
                if not math.isfinite(value):
                    sampled.problems[place] = NONE_ALLOWED if bool((x == -math.inf).all()) else NOT_FINITE
                if shown is not None:
                    sampled.logprobs[place] = _entry(shown, token, table.slots[int(slots[place])].sampling)
        if self._matchers is not None and masks:
            done = [place for place in masks if place not in sampled.problems]
            taken = [(int(slots[i]), int(table.num_tokens[slots[i]]), sampled.token_ids[i]) for i in done]
            self._matchers.sampled(taken)
        return sampled

    def _masks(self, slots: list[int], table: Slots, sampled: Sampled) -> dict[int, Tensor]:
        """Which tokens the masks allow, [vocab] bool by row. Rows without their mask wait or fail."""
        matchers = self._matchers
        rows = {slot: place for place, slot in enumerate(slots) if table.slots[slot].sampling.constraint is not None}
        if not rows or matchers is None:
            return {}
        wanted = {slot: int(table.num_tokens[slot]) for slot in rows}
        # a wait would hold up the launches of later steps, and only rows of the host are here
        matchers.wait(wanted, has_others=len(rows) < len(slots) or self._runs_ahead)
        allowed = {}
        for slot, place in rows.items():
            if problem := matchers.problem(slot):
                sampled.problems[place] = problem
            elif (mask := matchers.mask(slot, wanted[slot])) is None:
                sampled.waiting.add(place)
            else:
                bits = np.unpackbits(mask.view(np.uint8), count=self._vocab_size, bitorder="little")
                allowed[place] = torch.from_numpy(bits.view(np.bool_)).to(self._device)
        return allowed

    def _row_of(self, slot: int, table: Slots) -> HostRow:
        owner, row = int(table.owners[slot]), self._rows.get(slot)
        if row is None or row.owner != owner:
            row = self._rows[slot] = HostRow.of(owner, table.slots[slot], self._eos, self._vocab_size, self._device)
        return row

    def _adjusted(self, x: Tensor, row: HostRow, slot: int, table: Slots, allowed: Tensor | None) -> Tensor:
        """x [vocab], changed by all steps before the choice. Raises ProcessorError."""
        if row.problem is not None:
            raise ProcessorError(row.problem.cause)
        state = table.slots[slot]
        ids = table.token_ids[slot, : table.num_tokens[slot]]
        output = ids[state.num_prompt_tokens :]
        if row.processors:
            prompt = ids[state.num_virtual : state.num_prompt_tokens].tolist()
            x = self._thread.run(row.processors, prompt, output.tolist(), x)
        if allowed is not None:
            banned = F.pad(~allowed, (0, len(x) - len(allowed)), value=True)  # and all tokens that adapters add
            x = x.masked_fill(banned, -math.inf)
        x = self._edited(x, row, len(ids), output.tolist() if row.words else [])
        if row.edits.has_penalties:
            x = self._penalized(x, state, ids, output)
        return x

    def _edited(self, x: Tensor, row: HostRow, index: int, output: list[int]) -> Tensor:
        edits = row.edits
        if edits.only_listed or edits.edits:
            listed = torch.tensor(list(edits.edits), device=x.device)
            bias = [-math.inf if index < until else bias for bias, until in edits.edits.values()]
            changed = x[listed] + torch.tensor(bias, dtype=x.dtype, device=x.device)
            x = torch.full_like(x, -math.inf) if edits.only_listed else x.clone()
            x[listed] = changed
        # the prompt does not count, as in vLLM
        if banned := [word[-1] for word in row.words if output[len(output) - len(word) + 1 :] == word[:-1]]:
            x = x.clone()
            x[banned] = -math.inf
        return x

    def _penalized(self, x: Tensor, state: Slot, ids: Ints, output: Ints) -> Tensor:
        sampling, x = state.sampling, x.clone()
        seen = torch.from_numpy(np.unique(ids[state.num_virtual :])).to(x.device)
        part = x[seen]
        by = sampling.repetition_penalty
        x[seen] = torch.where(part > 0, part / by, part * by)
        tokens, counts = np.unique(output, return_counts=True)
        less = sampling.frequency_penalty * counts + sampling.presence_penalty
        x[torch.from_numpy(tokens).to(x.device)] -= torch.from_numpy(less).to(x.device, x.dtype)
        return x


def _entry(shown: Tensor, token: int, sampling: Sampling) -> TokenLogprobs:
    """shown [vocab]: the reported value of each token."""
    if sampling.logprob_token_ids:
        return score_listed(shown, token, sampling.logprob_token_ids)
    (entry,) = score(shown[None], torch.tensor([token], device=shown.device), sampling.num_logprobs or 0)
    return entry
