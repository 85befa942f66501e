"""Samples one token for each row on the host.

Log-probabilities are taken from the raw logits first. Then the steps of `logits_steps` change the logits in order.
Greedy rows take the likeliest token; other rows sample after temperature, min-p, top-k and top-p. With a processed mode
of `LogprobsMode`, log-probabilities are taken behind all of these.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.sampling.host_steps import HOST_PARAMETERS, HOST_STEPS, StepResources, StoppedRows
from blockyard.services.gpu_worker.sampling.logits_steps import LOGITS_STEPS, unsupported_reason
from blockyard.services.gpu_worker.sampling.logprobs import score
from blockyard.services.gpu_worker.sampling.metadata import SamplingMetadata
from blockyard.services.gpu_worker.sampling.topk_topp_sampler import (
    Noise,
    SamplingLimits,
    processed,
    sample,
    sample_limited,
)
from blockyard.services.gpu_worker.slots import NONE_ALLOWED, NOT_FINITE, Problem, Slots
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.shared.config.services.worker import LogprobsMode
from blockyard.shared.messages import SlotStart, TokenLogprobs

MOST_HOST_ROWS = 32  # slots of a GPU whose logits the host reads in one step


@dataclass(slots=True)
class Sampled:
    """A token for each row. The token of a row that waits or has a problem is invalid."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row
    problems: dict[int, Problem] = field(default_factory=dict)  # by row
    waiting: set[int] = field(default_factory=set)  # rows without a token: they compute their position again


class Sampler:
    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        matchers: MatcherProcesses | None = None,
    ) -> None:
        """matchers: make the masks of structured output. None: slots with a constraint cannot be sampled."""
        self._resources = StepResources(vocab_size, eos_token_ids, device, matchers)
        self._vocab_size, self._device = vocab_size, device
        self._mode = LogprobsMode.RAW_LOGPROBS
        self.reset(0)

    def report(self, mode: LogprobsMode) -> None:
        """Sets what later rows report as log-probabilities."""
        self._mode = mode

    def reset(self, num_slots: int) -> None:
        self._metadata = SamplingMetadata(num_slots, self._vocab_size)
        self._has_state = np.zeros(num_slots, np.bool_)  # by slot: the steps have counted its tokens so far
        names = [step.name for step in LOGITS_STEPS]
        make = [HOST_STEPS[name] for name in names if name in HOST_STEPS]
        self._steps = [step(self._resources) for step in make]
        self._parameters = [HOST_PARAMETERS[name] for name in names if name in HOST_PARAMETERS]

    def start(self, start: SlotStart) -> str:
        """Starts a slot with valid token ids. Returns why it cannot be sampled, empty if it can."""
        slot, sampling = start.slot, start.sampling
        problem = unsupported_reason(sampling, self._vocab_size)
        if sampling.constraint is not None and self._resources.matchers is None:
            problem = "this worker makes no masks of structured output"
        if problem:
            return problem
        self.end(slot)
        for set_parameter in self._parameters:
            set_parameter(self._metadata, slot, sampling)
        self._metadata.start(start)
        return ""

    def end(self, slot: int) -> None:
        """Drops the state of all steps. The next `sample` of the slot builds it from all its tokens."""
        if 0 <= slot < len(self._has_state) and self._has_state[slot]:
            self._has_state[slot] = False
            for step in self._steps:
                step.end(slot)

    def sample(self, logits: Tensor, slots: Ints, table: Slots) -> Sampled:
        """logits [rows, vocab] of these slots; may be written to."""
        for slot in slots[~self._has_state[slots]].tolist():
            self._build_state(slot, table)
        if self._metadata.plain[slots].all():
            values, tokens = logits.max(dim=-1)
            return _finish(logits, values, tokens)
        rows = slots.tolist()
        logits = logits.float()
        is_raw = self._mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS)
        scores = self._reported(logits, slots) if is_raw else []
        stopped = StoppedRows()
        for step in self._steps:
            step.apply(logits, rows, table, stopped)
        sampled = _finish(logits, *self._choose(logits, slots, table))
        if not is_raw:
            scores = self._reported(logits, slots)
        token_ids = sampled.token_ids
        if stopped.problems or stopped.waiting:
            sampled.problems |= stopped.problems
            sampled.waiting |= stopped.waiting
            taken = [i for i in range(len(rows)) if i not in stopped.problems and i not in stopped.waiting]
            rows, token_ids = [rows[i] for i in taken], [token_ids[i] for i in taken]
        for step in self._steps:
            step.on_sampled(rows, token_ids, table)
        for places, logprobs, num_top in scores:
            tokens = torch.tensor([sampled.token_ids[i] for i in places], device=self._device)
            sampled.logprobs.update(zip(places, score(logprobs, tokens, num_top), strict=True))
        return sampled

    def _build_state(self, slot: int, table: Slots) -> None:
        state, ids = table.slots[slot], table.token_ids[slot, : table.num_tokens[slot]]
        adjusted = [step.start(slot, state.sampling, ids, state.num_prompt_tokens) for step in self._steps]
        if any(adjusted):
            self._metadata.set_adjusted(slot)
        self._has_state[slot] = True

    def _reported(self, logits: Tensor, slots: Ints) -> list[tuple[list[int], Tensor, int]]:
        """What rows report for each token, grouped by how many top tokens they list."""
        wanted = self._metadata.num_logprobs[slots]
        groups = []
        for num_top in sorted({num for num in wanted.tolist() if num >= 0}):
            places = np.flatnonzero(wanted == num_top)
            rows = logits if len(places) == len(slots) else logits[self._tensor(places)]
            groups.append((places.tolist(), self._values(rows, slots[places]), num_top))
        return groups

    def _values(self, logits: Tensor, slots: Ints) -> Tensor:
        if self._mode is LogprobsMode.RAW_LOGPROBS:
            return logits.log_softmax(-1)
        if self._mode is LogprobsMode.RAW_LOGITS:
            return logits.clone()  # steps change the logits
        metadata = self._metadata
        noisy = metadata.noisy[slots]
        temperature = self._tensor(np.where(noisy, metadata.temperature[slots], 1.0).astype(np.float32))
        top_k, top_p, min_p = (
            np.where(noisy, values, off).astype(values.dtype)
            for values, off in (
                (metadata.top_k[slots], self._vocab_size),
                (metadata.top_p[slots], 1.0),
                (metadata.min_p[slots], 0.0),
            )
        )
        limits = SamplingLimits(self._tensor(top_k), self._tensor(top_p), self._tensor(min_p))
        return processed(logits, temperature, limits, as_logits=self._mode is LogprobsMode.PROCESSED_LOGITS)

    def _choose(self, logits: Tensor, slots: Ints, table: Slots) -> tuple[Tensor, Tensor]:
        """Scores of the chosen tokens, and their ids."""
        noisy, limited = self._metadata.noisy[slots], self._metadata.limited[slots]
        if limited.all():
            return self._sample_limited(logits, slots, table)
        if noisy.all() and not limited.any():
            return self._sample_all(logits, slots, table)
        values, tokens = logits.max(dim=-1)
        for rows, how in ((noisy & ~limited, self._sample_all), (limited, self._sample_limited)):
            places = np.flatnonzero(rows)
            if len(places):
                index = self._tensor(places)
                values[index], tokens[index] = how(logits[index], slots[places], table)
        return values, tokens

    def _sample_all(self, logits: Tensor, slots: Ints, table: Slots) -> tuple[Tensor, Tensor]:
        return sample(self._scale(logits, slots), self._noise(slots, table))

    def _sample_limited(self, logits: Tensor, slots: Ints, table: Slots) -> tuple[Tensor, Tensor]:
        metadata = self._metadata
        limits = SamplingLimits(*(self._tensor(a[slots]) for a in (metadata.top_k, metadata.top_p, metadata.min_p)))
        return sample_limited(self._scale(logits, slots), limits, self._noise(slots, table))

    def _scale(self, logits: Tensor, slots: Ints) -> Tensor:
        return logits / self._tensor(self._metadata.temperature[slots])[:, None]

    def _noise(self, slots: Ints, table: Slots) -> Noise:
        metadata = self._metadata
        arrays = (metadata.key[:, slots], table.num_tokens[slots], metadata.choice[slots])
        return Noise(*(self._tensor(a) for a in arrays))

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _finish(logits: Tensor, values: Tensor, tokens: Tensor) -> Sampled:
    """Copies tokens to the host, and finds rows where no token is valid."""
    sampled = Sampled(tokens.tolist())
    for row, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            none_left = bool((logits[row] == -math.inf).all())
            sampled.problems[row] = NONE_ALLOWED if none_left else NOT_FINITE
    return sampled
