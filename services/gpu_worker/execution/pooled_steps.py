"""Steps of decoders with pooled hidden states: prefills without sampling. The same on a GPU and on the CPU.

The host knows all tokens, so there is no state of slots on a device. Blocks, chunks and preemption are as for
generation. A sequence that enters its slot again starts over.
"""

from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.slots.slot_state import SlotOutcome, SlotState
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder, MetadataBuilder
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.device_loop import LaunchedStep, StepRequest
from blockyard.services.gpu_worker.execution.device_slots import SLOTS, DeviceSlots
from blockyard.services.gpu_worker.execution.packed_graphs import PackedGraphs
from blockyard.services.gpu_worker.host_link import CompletedEvent, SameMemory, put
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.memory import blocks_of
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.pooling.chunks import PooledChunk
from blockyard.services.gpu_worker.pooling.output import PoolingOptions, PoolingOutput, options_of
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import Attend, Step
from blockyard.shared.messages import Geometry, PooledStart

NO_INTS: Ints = np.zeros(0, np.int64)
HOST = torch.device("cpu")
NOTHING_SAID = PooledStart()


class ChunkAttention(Protocol):
    """The attention of prefills over the KV pool, of one device."""

    def __call__(self, table: Slots, step: StepRequest, rows: Ints, positions: Ints) -> Attend:
        """Returns the attention of a step. rows: the slot of each token; positions: its place in its sequence."""


class CpuChunkAttention:
    """Implements `ChunkAttention`."""

    def __init__(self, pool: KVPool, builder: MetadataBuilder | None = None) -> None:
        """builder: None for `CpuMetadataBuilder`."""
        self._pool, self._builder = pool, builder or CpuMetadataBuilder(pool)

    def __call__(self, table: Slots, step: StepRequest, rows: Ints, positions: Ints) -> Attend:
        slots, counts, size = step.rows.slots, step.rows.counts, self._pool.block_size
        lengths = table.num_computed[slots] + counts
        tables = table.tables[:, : int(lengths.max()) // size + 1][slots]
        blocks = table.tables[rows, positions // size]
        return self._builder.attention(
            blocks, positions % size, tables, counts, lengths, step.owners, step.rows.num_decodes
        )


class PooledSteps:
    """Implements `device_loop.DeviceSteps`."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        batch: Batch,
        geometry: Geometry,
        output: PoolingOutput,
        attention: ChunkAttention,
        graphs: PackedGraphs | None = None,
    ) -> None:
        """attention: of steps that are launched kernel by kernel. graphs: None: all are."""
        self._model, self._pool, self._batch, self._output = model, pool, batch, output
        self._attention, self.graphs = attention, graphs
        self.capacity = geometry.max_num_seqs
        self.runs_ahead = model.table.link.copies
        self.most_in_flight = 2 if self.runs_ahead else 1
        state = SlotState.make(SLOTS * self.capacity, self.capacity, 0, HOST)
        self.slots = DeviceSlots(state, SLOTS * self.capacity, geometry.vocab_size, [], SameMemory())
        self._owners: dict[int, int] = {}  # by slot, of sequences that have begun

    def reset(self) -> None:
        self.slots.reset(0)
        for slot in self._owners:
            self._output.drop(slot)
        self._owners.clear()

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
        pooled_of = [table.slots[slot].pooled or NOTHING_SAID for slot in slots.tolist()]
        options = [options_of(one.params) for one in pooled_of]
        self._begin(slots.tolist(), step.owners.tolist(), firsts.tolist(), options)
        rows = np.repeat(slots, counts)
        positions = np.arange(len(rows)) + np.repeat(lengths - np.cumsum(counts), counts)
        ids = table.token_ids[rows, positions]
        self._batch.block_hashes.invalidate(table.tables[rows, positions // self._pool.block_size])
        hidden = self._replay(step, ids, positions)
        if hidden is None:
            attend = self._attention(table, step, rows, positions)
            hidden = self._model.forward(Step(self._put(ids), self._put(positions), attend))
        totals = table.num_start_tokens[slots]
        skips = np.array([one.skip for one in pooled_of], np.int64)
        chunk = PooledChunk(hidden, slots, firsts, counts, totals, skips, ids, self._model.table.link)
        pooled = self._output.add(chunk, [(len(list(alike)), option) for option, alike in groupby(options)])
        outcomes = np.where(lengths == totals, SlotOutcome.NOTHING, SlotOutcome.PART)
        return LaunchedStep((outcomes, np.zeros_like(lengths), lengths), pooled.done, pooled=pooled)

    def _replay(self, step: StepRequest, ids: Ints, positions: Ints) -> Tensor | None:
        """Launches the CUDA graph of a step. None: none fits it."""
        if self.graphs is None or self._pool.scales_pending:  # an eager step measures scales
            return None
        slots, counts, table = step.rows.slots, step.rows.counts, self._batch.slots
        longest = int((table.num_computed[slots] + counts).max())
        tables = table.tables[:, : blocks_of(longest, self._pool.block_size)][slots].astype(np.int32)
        return self.graphs.forward(ids, positions, counts, tables=tables)

    def _begin(self, slots: list[int], owners: list[int], firsts: list[int], options: list[PoolingOptions]) -> None:
        """Forgets what a slot's earlier owner left."""
        for slot, owner, first, option in zip(slots, owners, firsts, options, strict=True):
            if self._owners.get(slot) != owner:
                self._owners[slot] = owner
                self._output.drop(slot)
                needs_all = self._output.needs_all_rows(option)
                assert not (first and needs_all), f"slot {slot} begins at {first}: this pooling needs all rows"

    def _put(self, values: Ints) -> Tensor:
        return put(values, self._pool.device, self._model.table.link)
