"""Samples the rows of a step on the CPU: what the sampling kernels do on a GPU, from the same fields of the slots.

What rows need of sampling changes only when a slot starts or ends. `SampledRows` finds it once for the rows of a step
and serves all steps with the same rows.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.sampling.sampling_state import SEEN
from blockyard.kernels.slots.slot_state import MAX_STOP_IDS, Field, SlotOutcome
from blockyard.services.gpu_worker.arrays import Bools, Ints, Words
from blockyard.services.gpu_worker.sampling.logits_edits import DeviceLogitsEdits
from blockyard.services.gpu_worker.sampling.logprobs import score
from blockyard.services.gpu_worker.sampling.topk_topp_sampler import NoisyRows, noisy_rows
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.shared.messages import TokenLogprobs

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EditedTokens:
    """The listed tokens of all rows, flat: see `LogitsEdits`."""

    rows: Tensor
    tokens: Tensor
    bias: Tensor
    until: Ints  # banned while the new token's index is below
    row_numbers: Ints  # `rows`
    last_until: int
    only: list[tuple[int, Tensor]]  # rows in which only these tokens are allowed


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    places: Tensor
    count_rows: Tensor  # of `LogitsEdits.counts`
    repetition: Tensor  # [rows, 1], as the others
    presence: Tensor
    frequency: Tensor


class SampledRows:
    """What sampling needs to know of the slots in the rows of a step."""

    def __init__(self, slots: Ints, all_fields: Words, edits: DeviceLogitsEdits, vocab_size: int, eos: Words) -> None:
        """all_fields: `SlotState.fields`. eos: end-of-sequence ids."""
        fields = self.fields = all_fields[:, slots]
        self.most = fields[Field.MAX_KNOWN]
        self.least_most = int(self.most.min())
        awaits_host = fields[Field.AWAITS_HOST] != 0
        self.awaits_host = bool(awaits_host.any())
        self.token_outcomes = np.full(len(slots), SlotOutcome.TOKEN, np.int64)
        self.all_ready = np.ones(len(slots), np.int32)
        stops = fields[Field.STOPS : Field.STOPS + MAX_STOP_IDS]
        listed = np.arange(MAX_STOP_IDS)[:, None] < fields[Field.NUM_STOPS]
        self.end_ids = frozenset(stops[listed].tolist())  # a row may end at one of these
        if not fields[Field.IGNORE_EOS].all():
            self.end_ids |= frozenset(eos.tolist())
        self.noisy = noisy_rows(fields, ~awaits_host, vocab_size)
        self.masked = np.flatnonzero(fields[Field.MASK_OWNER])
        edited = np.flatnonzero(fields[Field.EDITS_ROW] >= 0)
        self.edited = _edited(slots, edited, fields, edits) if fields[Field.NUM_LISTED][edited].any() else None
        self.penalized = _penalized(edited, fields)
        num_top = fields[Field.NUM_TOP]
        self.reported = [(np.flatnonzero(num_top == num), num) for num in sorted({*num_top[num_top >= 0].tolist()})]
        self.changes_logits = bool(len(self.masked)) or self.edited is not None or self.penalized is not None
        self.is_greedy = not (self.noisy or self.changes_logits or self.reported)


def _edited(slots: Ints, edited: Ints, fields: Words, edits: DeviceLogitsEdits) -> EditedTokens:
    table = edits.tensors
    listed, bias, until = table.listed.numpy(), table.bias.numpy(), table.until.numpy()
    numbers = fields[Field.NUM_LISTED]
    places = np.repeat(edited, numbers[edited])
    flat = [(slots[place], slice(numbers[place])) for place in edited.tolist()]
    tokens, biases, untils = (np.concatenate([one[at] for at in flat]) for one in (listed, bias, until))
    only = [
        (place, torch.from_numpy(listed[slots[place], : numbers[place]].astype(np.int64)))
        for place in edited.tolist()
        if fields[Field.ONLY_LISTED][place]
    ]
    return EditedTokens(
        torch.from_numpy(places),
        torch.from_numpy(tokens.astype(np.int64)),
        torch.from_numpy(biases),
        untils,
        places,
        int(untils.max(initial=0)),
        only,
    )


def _penalized(edited: Ints, fields: Words) -> PenalizedRows | None:
    columns = [fields[one].view(np.float32) for one in (Field.REPETITION, Field.PRESENCE, Field.FREQUENCY)]
    repetition, presence, frequency = columns
    places = edited[((repetition != 1) | (presence != 0) | (frequency != 0))[edited]]
    if not len(places):
        return None
    weights = (torch.from_numpy(one[places])[:, None] for one in columns)
    rows = torch.from_numpy(fields[Field.EDITS_ROW][places].astype(np.int64))
    return PenalizedRows(torch.from_numpy(places), rows, *weights)


@dataclass(slots=True)
class CpuSample:
    """A token for each row, with its score and what else the step reports."""

    token_ids: Ints
    best: list[float]  # -inf: no token is allowed; NaN: the logits are not finite
    ready: Words | None = None  # 0: the row's mask is missing; None: all are there
    logprobs: dict[int, TokenLogprobs] | None = None  # by row


class CpuSampler:
    """Samples rows by `SampledRows`."""

    def __init__(self, edits: DeviceLogitsEdits, vocab_size: int, matchers: MatcherProcesses | None) -> None:
        self._edits, self._vocab_size, self._matchers = edits, vocab_size, matchers

    def sample(self, logits: Tensor, slots: Ints, index: Ints, rows: SampledRows) -> CpuSample:
        """logits [rows, vocab] may be written to, and are wider where adapters add tokens. index: of the new token in
        its sequence."""
        if rows.is_greedy:
            values, tokens = logits.max(dim=-1)
            return CpuSample(tokens.numpy(), values.tolist())
        logits = logits.float()
        scores = [
            (places, (logits if len(places) == len(slots) else logits[torch.from_numpy(places)]).log_softmax(-1), num)
            for places, num in rows.reported
        ]
        ready = None
        if rows.changes_logits:
            if len(rows.masked):
                ready = self._mask(logits, slots, index, rows)
            if rows.edited is not None:
                _edit(logits, index, rows.edited)
            if rows.penalized is not None:
                self._penalize(logits, rows.penalized)
        values, tokens = _choose(logits, index, rows.noisy)
        best, token_ids = values.tolist(), tokens.numpy()
        for place, value in enumerate(best):
            if not math.isfinite(value) and bool((logits[place] == -math.inf).all()):
                best[place] = -math.inf
        if rows.penalized is not None:
            self._count(rows.penalized, tokens, best, ready)
        if ready is not None:
            self._publish(slots, index, token_ids, best, ready, rows.masked)
        logprobs: dict[int, TokenLogprobs] = {}
        for places, logs, num in scores:
            logprobs.update(zip(places.tolist(), score(logs, tokens[torch.from_numpy(places)], num), strict=True))
        return CpuSample(token_ids, best, ready, logprobs)

    def _mask(self, logits: Tensor, slots: Ints, index: Ints, rows: SampledRows) -> Words:
        """Bans what masks do not allow. Waits for masks that are missing. Returns the rows that are ready."""
        matchers, ready = self._matchers, np.ones(len(slots), np.int32)
        assert matchers is not None
        places = rows.masked[index[rows.masked] < rows.most[rows.masked]]
        if not len(places):
            return ready
        wanted = dict(zip(slots[places].tolist(), index[places].tolist(), strict=True))
        matchers.wait(wanted, has_others=len(places) < len(slots))
        masks, there = [], []
        for place, (slot, at) in zip(places.tolist(), wanted.items(), strict=True):
            if (mask := matchers.mask(slot, at)) is None:
                ready[place] = 0
            else:
                masks.append(mask)
                there.append(place)
        if masks:
            words = np.invert(np.stack(masks)).view(np.uint8)
            bits = np.unpackbits(words, axis=1, count=self._vocab_size, bitorder="little")
            banned = torch.from_numpy(bits.view(np.bool_))
            if (added := logits.shape[1] - self._vocab_size) > 0:
                banned = F.pad(banned, (0, added), value=True)  # no grammar allows tokens that adapters add
            if len(there) == len(slots):
                logits.masked_fill_(banned, -math.inf)
            else:
                rows_of_masks = torch.tensor(there)
                logits[rows_of_masks] = logits[rows_of_masks].masked_fill_(banned, -math.inf)
        return ready

    def _penalize(self, logits: Tensor, rows: PenalizedRows) -> None:
        """Repetition counts tokens of prompt and output; presence and frequency count the output alone, as in vLLM."""
        counts = self._edits.tensors.counts[rows.count_rows, : logits.shape[1]]
        by = torch.where(counts > 0, rows.repetition, 1.0)
        number = counts & (SEEN - 1)
        part = logits[rows.places]
        part = torch.where(part > 0, part / by, part * by)
        part -= rows.frequency * number
        part -= rows.presence * (number > 0)
        logits[rows.places] = part

    def _count(self, rows: PenalizedRows, tokens: Tensor, best: list[float], ready: Words | None) -> None:
        counted = rows.places.numpy()
        taken: Bools = np.isfinite(np.array(best, np.float32)[counted])
        if ready is not None:
            taken &= ready[counted] != 0
        if taken.all():
            self._edits.tensors.counts[rows.count_rows, tokens[rows.places]] += 1
        else:
            chosen = torch.from_numpy(taken)
            self._edits.tensors.counts[rows.count_rows[chosen], tokens[rows.places[chosen]]] += 1

    def _publish(
        self, slots: Ints, index: Ints, token_ids: Ints, best: list[float], ready: Words, masked: Ints
    ) -> None:
        """Tells the matchers what the masked rows have sampled."""
        assert self._matchers is not None
        done = [place for place in masked.tolist() if ready[place] and math.isfinite(best[place])]
        if done:
            columns = (slots[done].tolist(), index[done].tolist(), token_ids[done].tolist())
            self._matchers.sampled(zip(*columns, strict=True))


def _edit(logits: Tensor, index: Ints, edited: EditedTokens) -> None:
    """Allows, biases and bans the listed tokens."""
    for place, tokens in edited.only:
        kept = logits[place, tokens]
        logits[place].fill_(-math.inf)
        logits[place, tokens] = kept
    bias = edited.bias
    if edited.last_until:
        banned = index[edited.row_numbers] < edited.until
        if banned.any():
            bias = bias.masked_fill(torch.from_numpy(banned), -math.inf)
    logits.index_put_((edited.rows, edited.tokens), bias, accumulate=True)


def _choose(logits: Tensor, index: Ints, groups: list[NoisyRows]) -> tuple[Tensor, Tensor]:
    """Scores of the chosen tokens, and their ids: the likeliest token of rows in no group."""
    at = torch.from_numpy(index)
    if len(groups) == 1 and groups[0].places is None:
        return groups[0].sample(logits, at)
    values, tokens = logits.max(dim=-1)
    for group in groups:
        assert group.places is not None
        values[group.places], tokens[group.places] = group.sample(logits, at)
    return values, tokens
