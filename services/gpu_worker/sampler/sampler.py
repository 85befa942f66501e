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

from blockyard.services.gpu_worker.sampler.draw import Limits, Noise, draw, draw_limited
from blockyard.services.gpu_worker.sampler.edits import Edit, apply_edits, make_edit
from blockyard.services.gpu_worker.sampler.logprobs import score
from blockyard.services.gpu_worker.sampler.penalties import Penalties
from blockyard.services.gpu_worker.sampler.settings import Settings, problem_with
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import SlotStart, TokenLogprobs

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
        self._settings = Settings(num_slots, self._vocab_size)
        self._penalties = Penalties(self._vocab_size, self._device)
        self._edits: dict[int, Edit] = {}

    def start(self, start: SlotStart) -> str:
        """Why the slot cannot be sampled; empty if it can. Its ids have been checked."""
        slot, asked = start.slot, start.sampling
        problem = problem_with(asked, self._vocab_size)
        if problem:
            return problem
        ids = np.frombuffer(start.token_ids, "<u4").astype(np.int64)
        penalised = self._penalties.start(slot, asked, ids, start.num_prompt_tokens)
        edit = make_edit(asked, self._eos, self._vocab_size, self._device)
        if edit is not None:
            self._edits[slot] = edit
        self._settings.start(start, adjusted=penalised or edit is not None)
        return ""

    def end(self, slot: int) -> None:
        self._penalties.end(slot)
        self._edits.pop(slot, None)

    def sample(self, logits: Tensor, slots: Ints, table: Slots) -> Sampled:
        """logits [rows, vocab] of these slots; may be written to."""
        if self._settings.plain[slots].all():
            return _finish(*reversed(logits.max(dim=-1)))
        rows = slots.tolist()
        logits = logits.float()
        scores = self._log_softmax(logits, slots)
        edits = [(i, slot, self._edits[slot]) for i, slot in enumerate(rows) if slot in self._edits]
        if edits:
            apply_edits(logits, edits, table)
        penalised = self._penalties.rows(rows)
        if penalised:
            self._penalties.apply(logits, penalised)
        sampled = _finish(*self._choose(logits, slots, table))
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
        for num_top in np.unique(wanted[wanted >= 0]).tolist():
            places = np.flatnonzero(wanted == num_top)
            rows = logits if len(places) == len(slots) else logits[self._tensor(places)]
            groups.append((places.tolist(), rows.log_softmax(-1), num_top))
        return groups

    def _choose(self, logits: Tensor, slots: Ints, table: Slots) -> tuple[Tensor, Tensor]:
        """Token ids and the values they won with."""
        settings = self._settings
        noisy, limited = settings.noisy[slots], settings.limited[slots]
        values, tokens = (None, None) if noisy.all() else logits.max(dim=-1)
        for places, is_limited in ((np.flatnonzero(noisy & ~limited), False), (np.flatnonzero(limited), True)):
            if not len(places):
                continue
            index = self._tensor(places)
            chosen = slots[places]
            part = logits if len(places) == len(slots) else logits[index]
            scaled = part / self._tensor(settings.temperature[chosen])[:, None]
            noise = Noise(
                self._tensor(settings.key[:, chosen]),
                self._tensor(table.known[chosen]),
                self._tensor(settings.choice[chosen]),
            )
            drawn, won = self._draw_limited(scaled, chosen, noise) if is_limited else draw(scaled, noise)
            if values is None or tokens is None:
                values, tokens = logits.new_empty(len(slots)), drawn.new_empty(len(slots))
            tokens[index], values[index] = drawn, won
        assert tokens is not None
        assert values is not None
        return tokens, values

    def _draw_limited(self, scaled: Tensor, slots: Ints, noise: Noise) -> tuple[Tensor, Tensor]:
        settings = self._settings
        limits = Limits(*(self._tensor(a[slots]) for a in (settings.top_k, settings.top_p, settings.min_p)))
        return draw_limited(scaled, limits, noise)

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _finish(tokens: Tensor, values: Tensor) -> Sampled:
    """To the host, with the rows where nothing could win."""
    sampled = Sampled(tokens.tolist())
    for row, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            none_left = value == -math.inf
            sampled.problems[row] = "no token is allowed here" if none_left else "the model's logits are not finite"
    return sampled
