"""Steps on the CPU: the host prepares a step, computes it and samples."""

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.cpu_attention import EXTRA_TOKENS
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder, length_order
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.sampling.logprobs import PromptLogprobs
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.messages import FinishReason, SlotResult

MOST_SAMPLED = 256  # rows at once: each needs several rows of the vocabulary in float32


class HostSteps:
    def __init__(self, model: Model, pool: KVPool, batch: Batch) -> None:
        self.metadata_builder = CpuMetadataBuilder(pool)
        self._model, self._pool, self._batch = model, pool, batch
        self._prompt_logprobs = PromptLogprobs(model)

    def reset(self) -> None:
        """Drops all state of slots."""
        self.metadata_builder.clear()

    def run(self, slots: Ints, counts: Ints) -> list[SlotResult]:
        """Computes `counts` tokens of each slot, decodes first. Logits that are not finite fail their slot alone."""
        table = self._batch.slots
        slots, begin, hidden = self.forward(slots, counts)
        table.advance(slots, counts)
        results = self._sample(slots, np.cumsum(counts) - 1, hidden)
        return self._prompt_logprobs.add(table, slots, counts, begin, hidden, results)

    def forward(self, slots: Ints, counts: Ints) -> tuple[Ints, Ints, Tensor]:
        """Returns slots in computed order, the tokens each had before, and the hidden rows of the new tokens."""
        table = self._batch.slots
        begin = table.num_computed[slots]
        lengths = begin + counts
        num_decodes = int((counts == 1).sum())
        if (order := length_order(lengths[:num_decodes])) is not None:
            for array in (slots, begin, lengths):
                array[:num_decodes] = array[:num_decodes][order]
        rows, positions = slots, begin
        if num_decodes < len(slots):
            rows = np.repeat(slots, counts)
            first = np.cumsum(counts) - counts
            positions = np.arange(len(rows)) - np.repeat(first - begin, counts)
        size = table.block_size
        blocks = table.tables[rows, positions // size]
        tables = table.tables[:, : (int(lengths.max()) + EXTRA_TOKENS) // size + 1][slots]
        self._batch.block_hashes.invalidate(blocks)
        attend = self.metadata_builder.attention(
            blocks, positions % size, tables, counts, lengths, table.owners[slots], num_decodes
        )
        step = Step(self._tensor(table.token_ids[rows, positions]), self._tensor(positions), attend)
        return slots, begin, self._model.forward(step)

    def _sample(self, slots: Ints, last: Ints, hidden: Tensor) -> list[SlotResult]:
        """Samples slots that have computed all their tokens. last: each slot's last row of `hidden`."""
        batch, table = self._batch, self._batch.slots
        lengths = table.num_computed[slots].tolist()
        at_end = (table.num_computed[slots] == table.num_tokens[slots]).tolist()
        results: list[SlotResult] = []
        ready: list[int] = []  # places in `slots`
        for place, slot in enumerate(slots.tolist()):
            full = lengths[place] >= table.slots[slot].max_num_tokens
            if at_end[place] and not full:
                ready.append(place)
                continue
            finish = FinishReason.LENGTH if at_end[place] else None
            if finish is not None:
                table.finish(slot)
            results.append(SlotResult(slot, [], lengths[place], finish))
        for i in range(0, len(ready), MOST_SAMPLED):
            part = ready[i : i + MOST_SAMPLED]
            chosen, rows = slots[part], hidden
            if len(part) < len(rows):
                rows = rows.index_select(0, self._tensor(last[part]))
            sampled = batch.sampler.sample(self._model.logits(rows), chosen, table)
            results += batch.append_sampled(sampled, chosen)
        return results

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._pool.device, non_blocking=True)
