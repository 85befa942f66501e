"""Picks a token a row: the pipeline over the parts in this folder.

In vLLM's order: log-probabilities of the raw logits; allowed ids, bad words, min_tokens and logit_bias; penalties;
then the likeliest token where temperature is 0, else temperature, min-p, top-k, top-p and the draw.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.sampling.edits import Edit, apply_edits, make_edit
from blockyard.services.gpu_worker.sampling.logprobs import score
from blockyard.services.gpu_worker.sampling.metadata import SamplingMetadata, unsupported_reason
from blockyard.services.gpu_worker.sampling.penalties import Penalties
from blockyard.services.gpu_worker.sampling.topk_topp_sampler import Noise, SamplingLimits, sample, sample_limited
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import Sampling, SlotStart, TokenLogprobs

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sampled:
    """A token for each row; rows with a problem have one that is not to be used."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row
    problems: dict[int, str] = field(default_factory=dict)  # by row


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: list[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, eos_token_ids, device
        self.reset(0)

    def reset(self, num_slots: int) -> None:
        self._settings = SamplingMetadata(num_slots, self._vocab_size)
        self._penalties = Penalties(self._vocab_size, self._device)
        self._edits: dict[int, Edit] = {}

    def start(self, start: SlotStart) -> str:
        """Why the slot cannot be sampled; empty if it can. Its ids have been checked."""
        slot, asked = start.slot, start.sampling
        problem = unsupported_reason(asked, self._vocab_size)
        if problem:
            return problem
        ids = np.frombuffer(start.token_ids, "<u4").astype(np.int64)
        penalised = self._penalties.start(slot, asked, ids, start.num_prompt_tokens)
        edit = make_edit(asked, self._eos, self._vocab_size, self._device)
        if edit is not None:
            self._edits[slot] = edit
        self._settings.start(start, adjusted=penalised or edit is not None)
        return ""

    def recount(self, slot: int, asked: Sampling, token_ids: Ints, num_prompt_tokens: int) -> None:
        """Tokens that were not sampled here are counted too."""
        self._penalties.end(slot)
        self._penalties.start(slot, asked, token_ids, num_prompt_tokens)

    def end(self, slot: int) -> None:
        self._penalties.end(slot)
        self._edits.pop(slot, None)

    def sample(self, logits: Tensor, slots: Ints, table: Slots) -> Sampled:
        """logits [rows, vocab] of these slots; may be written to."""
        if self._settings.plain[slots].all():
            values, tokens = logits.max(dim=-1)
            return _finish(logits, values, tokens)
        rows = slots.tolist()
        logits = logits.float()
        scores = self._log_softmax(logits, slots)
        edits = [(i, slot, self._edits[slot]) for i, slot in enumerate(rows) if slot in self._edits]
        if edits:
            apply_edits(logits, edits, table)
        penalised = self._penalties.rows(rows)
        if penalised:
            self._penalties.apply(logits, penalised)
        sampled = _finish(logits, *self._choose(logits, slots, table))
        if penalised:
            self._penalties.count(penalised, sampled.token_ids)
        for places, logprobs, num_top in scores:
            tokens = torch.tensor([sampled.token_ids[i] for i in places], device=self._device)
            sampled.logprobs.update(zip(places, score(logprobs, tokens, num_top), strict=True))
        return sampled

    def _log_softmax(self, logits: Tensor, slots: Ints) -> list[tuple[list[int], Tensor, int]]:
        """Rows that want log-probabilities, grouped by how many: taken here, before anything changes the logits."""
        wanted = self._settings.num_logprobs[slots]
        groups = []
        for num_top in sorted({num for num in wanted.tolist() if num >= 0}):
            places = np.flatnonzero(wanted == num_top)
            rows = logits if len(places) == len(slots) else logits[self._tensor(places)]
            groups.append((places.tolist(), rows.log_softmax(-1), num_top))
        return groups

    def _choose(self, logits: Tensor, slots: Ints, table: Slots) -> tuple[Tensor, Tensor]:
        """What won, and the token ids."""
        noisy, limited = self._settings.noisy[slots], self._settings.limited[slots]
        if limited.all():
            return self._draw_limited(logits, slots, table)
        if noisy.all() and not limited.any():
            return self._draw(logits, slots, table)
        values, tokens = logits.max(dim=-1)
        for rows, how in ((noisy & ~limited, self._draw), (limited, self._draw_limited)):
            places = np.flatnonzero(rows)
            if len(places):
                index = self._tensor(places)
                values[index], tokens[index] = how(logits[index], slots[places], table)
        return values, tokens

    def _draw(self, logits: Tensor, slots: Ints, table: Slots) -> tuple[Tensor, Tensor]:
        return sample(self._scale(logits, slots), self._noise(slots, table))

    def _draw_limited(self, logits: Tensor, slots: Ints, table: Slots) -> tuple[Tensor, Tensor]:
        settings = self._settings
        limits = SamplingLimits(*(self._tensor(a[slots]) for a in (settings.top_k, settings.top_p, settings.min_p)))
        return sample_limited(self._scale(logits, slots), limits, self._noise(slots, table))

    def _scale(self, logits: Tensor, slots: Ints) -> Tensor:
        return logits / self._tensor(self._settings.temperature[slots])[:, None]

    def _noise(self, slots: Ints, table: Slots) -> Noise:
        settings = self._settings
        arrays = (settings.key[:, slots], table.num_tokens[slots], settings.choice[slots])
        return Noise(*(self._tensor(a) for a in arrays))

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _finish(logits: Tensor, values: Tensor, tokens: Tensor) -> Sampled:
    """To the host, with the rows where nothing could win."""
    sampled = Sampled(tokens.tolist())
    for row, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            none_left = bool((logits[row] == -math.inf).all())
            sampled.problems[row] = "no token is allowed here" if none_left else "the model's logits are not finite"
    return sampled
