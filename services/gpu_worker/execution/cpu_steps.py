"""Steps on the CPU, where the host has the state of all slots: computed before their launch returns."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.slots.slot_references import slot_outcomes
from blockyard.kernels.slots.slot_state import Field, SlotOutcome, SlotState
from blockyard.services.gpu_worker.arrays import Bools, Ints
from blockyard.services.gpu_worker.attention.cpu_attention import EXTRA_TOKENS
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder, MetadataBuilder, length_order
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.device_loop import LaunchedStep, ReadLogprobs, StepRequest
from blockyard.services.gpu_worker.execution.device_slots import SLOTS, DeviceSlots
from blockyard.services.gpu_worker.execution.prompt_logprobs import DevicePromptLogprobs, ScoredRows
from blockyard.services.gpu_worker.host_link import CompletedEvent
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.sampling.cpu_sampler import CpuSample, CpuSampler, SampledRows
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.messages import Geometry, TokenLogprobs

MOST_SAMPLED = 256  # rows at once: each needs several rows of the vocabulary in float32
NO_INTS: Ints = np.zeros(0, np.int64)
DONE = CompletedEvent()
NOTHING = LaunchedStep((NO_INTS, NO_INTS, NO_INTS), DONE)


class PreparedStep(NamedTuple):
    """A step with known inputs that is not computed."""

    request: StepRequest
    inputs: Step
    lengths: Ints  # of the sequences, with the step's tokens
    longest: int
    at_end: Bools  # rows that compute all their tokens, so that they sample
    adapter_places: Tensor | None  # [tokens] int32; None: no token has an adapter


class CpuSteps:
    """Implements `device_loop.DeviceSteps`. Tokens, positions and lengths are read from `Batch.slots`; the fields of
    `DeviceSlots` have the parameters of sampling alone."""

    runs_ahead = False
    most_in_flight = 1  # the table lacks the tokens of a step until it is collected

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        batch: Batch,
        geometry: Geometry,
        logits_edits: bool = True,
        metadata: MetadataBuilder | None = None,
    ) -> None:
        """logits_edits: steps change logits and report log-probabilities; False: the host does, for such slots.
        metadata: None for `CpuMetadataBuilder`."""
        self._model, self._batch = model, batch
        self.capacity, vocab_size = geometry.max_num_seqs, geometry.vocab_size
        state = SlotState.make(SLOTS * self.capacity, self.capacity, 0, pool.device)
        matchers, eos, extra = batch.matchers, geometry.eos_token_ids, geometry.num_extra_tokens
        link = model.table.link
        owner_of = None if matchers is None else matchers.owner_of
        self.slots = DeviceSlots(state, SLOTS * self.capacity, vocab_size, eos, link, logits_edits, owner_of, extra)
        self._metadata_builder = CpuMetadataBuilder(pool) if metadata is None else metadata
        self._sampler = CpuSampler(self.slots.logits_edits, vocab_size, matchers)
        self._prompt_logprobs = DevicePromptLogprobs(model, None, pool.device)
        self._fields, self._vocab_size, self._eos = state.fields.numpy(), vocab_size, np.array(eos, np.int32)
        self._rows: SampledRows | None = None  # of the last step that sampled
        self._rows_key: tuple[int, bytes] = (-1, b"")

    def reset(self) -> None:
        self.slots.reset(0)
        self._metadata_builder.clear()

    def idle(self) -> bool:
        """There is no background work."""
        return False

    def order(self, slots: Ints) -> None:
        """Sorts by length where lengths differ so much that padding would cost more."""
        if (order := length_order(self._batch.slots.num_computed[slots] + 1)) is not None:
            slots[:] = slots[order]

    def launch(self, step: StepRequest) -> LaunchedStep:
        prepared = self.prepare(step)
        return NOTHING if prepared is None else self.compute(prepared)

    def prepare(self, step: StepRequest) -> PreparedStep | None:
        """Reads what a step needs of the slots. None: it computes nothing."""
        slots, counts, table = step.rows.slots, step.rows.counts, self._batch.slots
        index, values = self.slots.take()
        if len(index):
            self.slots.state.arena.numpy()[index] = values
        if not len(slots):
            return None
        lengths = table.num_computed[slots] + counts
        longest = int(lengths.max())
        rows = np.repeat(slots, counts) if step.rows.has_prefill else slots
        inputs = self._inputs(step, rows, lengths, longest)
        places = torch.from_numpy(table.adapter_places[rows]) if table.are_adapted(slots) else None
        return PreparedStep(step, inputs, lengths, longest, lengths == table.num_tokens[slots], places)

    def compute(self, prepared: PreparedStep) -> LaunchedStep:
        step, inputs, lengths, longest, at_end, places = prepared
        self._model.adapter_rows.begin(places)
        slots, hidden = step.rows.slots, self._model.forward(inputs)
        prompts = self._prompt_logprobs.compute_rows(step.scored, hidden, 0, 0) if step.scored else ()
        if step.rows.has_prefill or len(slots) > MOST_SAMPLED or not at_end.all():
            return self._sample_some(step, hidden, lengths, np.flatnonzero(at_end), prompts)
        logits = self._model.logits(hidden)
        host_logits = logits[step.host_rows].float() if step.host_rows else None
        rows = self._rows_of(slots)
        drawn = self._sampler.sample(logits, slots, lengths, rows)
        read = None if drawn.logprobs is None else _reader(drawn.logprobs)
        if _goes_on(rows, drawn, lengths, longest):
            results = rows.token_outcomes, drawn.token_ids, lengths
            return LaunchedStep(results, DONE, (), read, host_logits, prompts, all_sampled=True)
        outcomes, computed = self._outcomes(rows, drawn, lengths)
        return LaunchedStep((outcomes, drawn.token_ids, computed), DONE, (), read, host_logits, prompts)

    def _inputs(self, step: StepRequest, rows: Ints, lengths: Ints, longest: int) -> Step:
        """The new tokens. rows: the slot of each. lengths: of the sequences, with these; `longest` of them."""
        table, size = self._batch.slots, self._batch.slots.block_size
        slots, counts = step.rows.slots, step.rows.counts
        positions = lengths - counts
        if step.rows.has_prefill:
            positions = np.arange(len(rows)) + np.repeat(lengths - np.cumsum(counts), counts)
        blocks = table.tables[rows, positions // size]
        tables = table.tables[:, : (longest + EXTRA_TOKENS) // size + 1][slots]
        self._batch.block_hashes.invalidate(blocks)
        attend = self._metadata_builder.attention(
            blocks, positions % size, tables, counts, lengths, step.owners, step.rows.num_decodes
        )
        token_ids = torch.from_numpy(table.token_ids[rows, positions])
        vectors = self._batch.input_vectors(rows, positions) if step.rows.has_prefill else None
        return Step(token_ids, torch.from_numpy(positions), attend, vectors=vectors)

    def _sample_some(
        self, step: StepRequest, hidden: Tensor, lengths: Ints, places: Ints, prompts: Sequence[ScoredRows]
    ) -> LaunchedStep:
        """Samples the slots at these places, which have computed all their tokens."""
        outcomes, token_ids = np.full(len(lengths), SlotOutcome.PART, np.int64), np.zeros(len(lengths), np.int64)
        computed, last = lengths.copy(), np.cumsum(step.rows.counts) - 1
        logprobs: dict[int, TokenLogprobs] = {}
        host_logits: list[Tensor] = []
        for first in range(0, len(places), MOST_SAMPLED):
            part = places[first : first + MOST_SAMPLED]
            indices = torch.from_numpy(last[part])
            with self._model.adapter_rows.only(indices):
                logits = self._model.logits(hidden.index_select(0, indices))
            if step.host_rows:
                host_logits.append(logits[torch.from_numpy(np.isin(part, step.host_rows))].float())
            rows = self._rows_of(step.rows.slots[part])
            drawn = self._sampler.sample(logits, step.rows.slots[part], lengths[part], rows)
            outcomes[part], computed[part] = self._outcomes(rows, drawn, lengths[part])
            token_ids[part] = drawn.token_ids
            if drawn.logprobs is not None:
                logprobs.update((int(part[row]), entry) for row, entry in drawn.logprobs.items())
        copied = _stacked(host_logits) if host_logits else None
        return LaunchedStep((outcomes, token_ids, computed), DONE, (), _reader(logprobs), copied, prompts)

    def _rows_of(self, slots: Ints) -> SampledRows:
        """The parameters of these slots, kept from the last step if they are the same."""
        key = self.slots.version, slots.tobytes()
        if self._rows is None or key != self._rows_key:
            edits = self.slots.logits_edits
            self._rows, self._rows_key = SampledRows(slots, self._fields, edits, self._vocab_size, self._eos), key
        return self._rows

    def _outcomes(self, rows: SampledRows, drawn: CpuSample, lengths: Ints) -> tuple[Ints, Ints]:
        """SlotOutcome and number of computed tokens of each row. lengths: of all known tokens."""
        ready = rows.all_ready if drawn.ready is None else drawn.ready
        rows.fields[Field.KNOWN] = lengths
        best = np.array(drawn.best, np.float32)
        outcomes = slot_outcomes(rows.fields, lengths, drawn.token_ids, best, ready, self._eos)
        return outcomes, lengths - (outcomes == SlotOutcome.WAITING)


def _goes_on(rows: SampledRows, drawn: CpuSample, lengths: Ints, longest: int) -> bool:
    """Whether each row has taken a token that does not end it."""
    return (
        drawn.ready is None
        and not rows.awaits_host
        and rows.end_ids.isdisjoint(drawn.token_ids.tolist())
        and all(map(math.isfinite, drawn.best))
        and (longest + 1 < rows.least_most or not (lengths + 1 >= rows.most).any())
    )


def _reader(logprobs: dict[int, TokenLogprobs]) -> ReadLogprobs:
    return lambda row, token, num_top: logprobs[row]


def _stacked(parts: list[Tensor]) -> Tensor:
    """Logits of all parts of a step. Parts with tokens that adapters add are wider."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=-math.inf) for part in parts])
