"""Steps of decoders whose hidden states are pooled: prefills without sampling. The same on a GPU and on the CPU.

The host knows all tokens, so there is no state of slots on a device. Blocks, chunks and preemption are as for
generation. A sequence that enters its slot again starts over.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.slots.slot_state import SlotOutcome, SlotState
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.device_loop import LaunchedStep, StepRequest
from blockyard.services.gpu_worker.execution.device_slots import SLOTS, DeviceSlots
from blockyard.services.gpu_worker.execution.pinned_ring import CompletedEvent
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.pooling.chunks import PooledChunk, PooledSequence
from blockyard.services.gpu_worker.pooling.output import DEFAULT, PoolingOptions, PoolingOutput
from blockyard.services.gpu_worker.pooling.poolers import RowsNeeded
from blockyard.services.gpu_worker.step import Attend, Step
from blockyard.shared.messages import Geometry

NO_INTS: Ints = np.zeros(0, np.int64)
HOST = torch.device("cpu")


class PooledSteps:
    """Implements `device_loop.DeviceSteps`."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        batch: Batch,
        geometry: Geometry,
        output: PoolingOutput,
        options: Mapping[int, PoolingOptions] | None = None,
    ) -> None:
        """options: by slot, what its request says; None: nothing."""
        self._model, self._pool, self._batch, self._output = model, pool, batch, output
        self._options = {} if options is None else options
        self.capacity = geometry.max_num_seqs
        self.runs_ahead = pool.device.type != "cpu"
        self.most_in_flight = 2 if self.runs_ahead else 1
        state = SlotState.make(SLOTS * self.capacity, self.capacity, 0, HOST)
        self.slots = DeviceSlots(state, SLOTS * self.capacity, geometry.vocab_size, [], False, None)
        self._cpu_metadata = None if self.runs_ahead else CpuMetadataBuilder(pool)
        self._owners: dict[int, int] = {}  # by slot, of sequences that have begun

    def reset(self) -> None:
        """Drops all slots."""
        self.slots.reset(0)
        for slot in self._owners:
            self._output.drop(slot)
        self._owners.clear()
        if self._cpu_metadata is not None:
            self._cpu_metadata.clear()

    def idle(self) -> bool:
        """There is no background work."""
        return False

    def order(self, slots: Ints) -> None:
        """The order does not matter."""

    def launch(self, step: StepRequest) -> LaunchedStep:
        slots, counts, table = step.rows.slots, step.rows.counts, self._batch.slots
        self.slots.take()
        if not len(slots):
            return LaunchedStep((NO_INTS, NO_INTS, NO_INTS), CompletedEvent())
        firsts = table.num_computed[slots]
        lengths = firsts + counts
        self._begin(slots.tolist(), step.owners.tolist(), firsts.tolist())
        rows = np.repeat(slots, counts)
        positions = np.arange(len(rows)) + np.repeat(lengths - np.cumsum(counts), counts)
        ids = table.token_ids[rows, positions]
        attend = self._attend(step, rows, positions, lengths)
        hidden = self._model.forward(Step(self._put(ids), self._put(positions), attend))
        totals = table.num_start_tokens[slots]
        columns = zip(slots.tolist(), firsts.tolist(), counts.tolist(), totals.tolist(), strict=True)
        sequences = [PooledSequence(*column) for column in columns]
        options = [self._options.get(one.slot, DEFAULT) for one in sequences]
        pooled = self._output.add(PooledChunk(hidden, sequences, ids), options)
        outcomes = np.where(lengths == totals, SlotOutcome.NOTHING, SlotOutcome.PART)
        return LaunchedStep((outcomes, np.zeros_like(lengths), lengths), pooled.done, pooled=pooled)

    def _begin(self, slots: list[int], owners: list[int], firsts: list[int]) -> None:
        """Forgets what a slot's earlier owner left."""
        for slot, owner, first in zip(slots, owners, firsts, strict=True):
            if self._owners.get(slot) != owner:
                self._owners[slot] = owner
                self._output.drop(slot)
                needs_all = self._output.pooler.rows is RowsNeeded.ALL
                assert not (first and needs_all), f"slot {slot} begins at {first}: this pooling needs all rows"

    def _attend(self, step: StepRequest, rows: Ints, positions: Ints, lengths: Ints) -> Attend:
        """rows: the slot of each token."""
        table, size, counts = self._batch.slots, self._pool.block_size, step.rows.counts
        blocks, longest = table.tables[rows, positions // size], int(lengths.max())
        self._batch.block_hashes.invalidate(blocks)
        if self._cpu_metadata is not None:
            tables = table.tables[:, : longest // size + 1][step.rows.slots]
            return self._cpu_metadata.attention(
                blocks, positions % size, tables, counts, lengths, step.owners, step.rows.num_decodes
            )
        # imports Triton, which is installed only on machines with a GPU
        from blockyard.services.gpu_worker.attention.triton_attention import build_attention  # noqa: PLC0415

        num_decodes, num_seqs = step.rows.num_decodes, len(counts)
        tables = table.tables[:, : -(-longest // size)][step.rows.slots].astype(np.int32)
        metadata = PagedKVMetadata(
            self._put(np.repeat(np.arange(num_seqs), counts)), self._put(positions), self._put(tables)
        )
        starts = np.concatenate([np.cumsum(counts) - counts, [len(rows)]])[num_decodes:].astype(np.int32)
        return build_attention(
            self._pool,
            AttentionMetadata(
                metadata,
                query_start_loc=self._put(starts) if num_decodes < num_seqs else None,
                num_decodes=num_decodes,
                max_seq_len=longest,
                max_context_len=int((lengths - counts).max()),
            ),
        )

    def _put(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self._pool.device, non_blocking=True) if self.runs_ahead else tensor
