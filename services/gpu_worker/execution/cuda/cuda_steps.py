"""Steps on a GPU: CUDA graphs where one fits, launched ahead of the host. Imports Triton."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.cuda import decode_graphs
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import (
    DecodeSettings,
    DecodeSize,
    DecodeSteps,
    num_mask_slots,
)
from blockyard.services.gpu_worker.execution.cuda.device_masks import share_masks
from blockyard.services.gpu_worker.execution.cuda.device_ops import make_device_ops
from blockyard.services.gpu_worker.execution.cuda.prefill_graphs import CudaGraphRecorder, PrefillGraphs
from blockyard.services.gpu_worker.execution.cuda.prefill_kernels import compile_prefills
from blockyard.services.gpu_worker.execution.cuda.prefill_sizes import MOST_BYTES
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import PrefillSteps, max_context, token_rows
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerEvents, LayerWords, layer_groups
from blockyard.services.gpu_worker.execution.device_loop import LaunchedStep, StepRequest
from blockyard.services.gpu_worker.execution.device_slots import DeviceSlots
from blockyard.services.gpu_worker.execution.pinned_ring import StepBuffers
from blockyard.services.gpu_worker.execution.prompt_logprobs import DevicePromptLogprobs, ScoredRows
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.linear_tuning.idle_tuning import IdleTuning
from blockyard.services.gpu_worker.memory import KVMemoryNeed
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.sampling.logits_edits import edits_bytes
from blockyard.services.gpu_worker.slots import StepRows
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import Geometry, KVRole, TokenLogprobs

NO_ROWS = np.zeros(0, np.int64)
NO_STEP = StepRequest(StepRows(NO_ROWS, NO_ROWS, 0), NO_ROWS, False, [], [], False)


class CudaSteps:
    """Implements `device_loop.DeviceSteps`. The state of the batch is on the device."""

    runs_ahead = True

    def __init__(
        self,
        decodes: DecodeSteps,
        batch: Batch,
        most_tokens: int,
        tuning: IdleTuning | None = None,
        records_layers: bool = False,
    ) -> None:
        """most_tokens: of a step. tuning: of linear layers in idle times, None: none is left. records_layers: CUDA
        graphs of prefills tell which layers are stored, for sends."""
        self.decodes, self._batch, self.prefills = decodes, batch, PrefillSteps(decodes)
        groups = layer_groups(decodes.pool.shape.num_layers)
        self.layer_words = (
            LayerWords(groups, decodes.ops, decodes.slots.state.step, decodes.link) if records_layers else None
        )
        self.graphs = PrefillGraphs(decodes, most_tokens, CudaGraphRecorder(decodes, self.layer_words))
        self._tuning = tuning
        self._prompt_logprobs = DevicePromptLogprobs(decodes.model, decodes.ops.gather_logprobs, decodes.pool.device)
        self._on_captured: Callable[[], None] = lambda: None
        self._least_rows, self._is_eager = 0, False  # of decodes

    @property
    def slots(self) -> DeviceSlots:
        return self.decodes.slots

    @property
    def capacity(self) -> int:
        return self.decodes.capacity

    @property
    def most_in_flight(self) -> int:
        return len(self.decodes.ring)

    def report_captures(self, on_captured: Callable[[], None]) -> None:
        """`on_captured` is called after each piece of work that `idle` did."""
        self._on_captured = on_captured

    def reset(self) -> None:
        """Drops all slots. No step may be in flight."""
        if self.decodes.changes is not None:
            self.decodes.changes.flush()
        self.slots.reset(self.decodes.ring.step)

    def order(self, slots: Ints) -> None:
        """Leaves the order as it is: rows that stay the same need no writes."""

    def capture_decodes(self) -> None:
        """Captures all sizes of decodes, and no prefills: replicas replay the same graphs at the same time.

        Raises LoadError if that fails.
        """
        self.decodes.capture(math.inf)
        if self.decodes.capture_error:
            raise LoadError(
                f"CUDA graphs could not be captured, --enforce-eager uses none: {self.decodes.capture_error}"
            )

    def most_rows(self, rows: StepRows) -> int:
        """Implements `PaddedSteps`: the last layer of a step with prefill has a row for each sequence, with padding."""
        tokens = int(rows.counts.sum())
        return max(tokens, self.decodes.padded_num_seqs(len(rows))) if rows.has_prefill else tokens

    def pad(self, num_rows: int | None) -> None:
        """Implements `PaddedSteps`."""
        self._least_rows, self._is_eager = num_rows or 0, num_rows is None

    def launch_padding(self) -> None:
        """Implements `PaddedSteps`."""
        size = self.decodes.padded(self._least_rows, 1)
        buffers = self._begin(NO_STEP, size.rows)
        self.decodes.sample(size, self.decodes.forward(size), needs_processing=False)
        buffers.done.record()

    def capture(self) -> None:
        """Captures CUDA graphs for a few seconds; `idle` captures the others."""
        self.decodes.capture()
        if not self.decodes.capture_error:
            self.graphs.capture()

    @property
    def captured(self) -> float:
        """The fraction of the work of `idle` that is done; 1.0: none is left."""
        parts = [self.decodes.captured, self.graphs.captured]
        if self._tuning is not None:
            parts.append(self._tuning.done)
        return sum(parts) / len(parts)

    def describe(self) -> list[str]:
        """Notes on graphs and tuned layers, one line each."""
        tuned = [self._tuning.describe()] if self._tuning is not None else []
        graphs = [self.graphs.describe()] if not self.decodes.capture_error else []
        return [*tuned, self.decodes.describe(), *graphs]

    def idle(self) -> bool:
        """Captures one missing size; with none missing, measures one linear layer. False: nothing is left."""
        if self.captured == 1.0:
            return False
        if not self.decodes.capture_one() and not self.graphs.capture_one() and self._tuning is not None:
            tuned_rows = self._tuning.step()
            if tuned_rows is not None:
                if self.decodes.mirror is not None:
                    self.decodes.mirror.install_kernels(self._tuning.installed(tuned_rows))
                self.decodes.capture_again(tuned_rows)
        self._on_captured()
        return self.captured < 1.0

    def launch(self, step: StepRequest) -> LaunchedStep:
        """Launches a step on the device. It tells which layers are stored if it is an eager step with prefills or a
        CUDA graph of prefills with `records_layers`."""
        slots = step.rows.slots
        self.slots.copy_logits_of(slots[step.host_rows].tolist())
        stored: Sequence[StoredLayers] = ()
        scores: Sequence[ScoredRows] = ()
        if not len(slots):
            buffers = self.decodes.ring.take()
            self.slots.count_step(self.decodes.ring.step)
        elif step.rows.has_prefill:
            buffers, stored, scores = self._launch_prefill(step)
        else:
            size, is_eager = self._size(slots), self._is_eager
            buffers = self._begin(step, size.rows)
            output = self.decodes.forward(size, is_eager=is_eager)
            self.decodes.sample(size, output, step.needs_processing, is_eager=is_eager)
            self._send_changes(slots, size.rows)
            scores = self._prompt_logprobs.compute_logits(step.scored, output.logits) if step.scored else []
        edits = self.slots.logits_edits
        if edits.num_logprobs:
            buffers.copy_logprobs(edits.buffer)
        host_logits = edits.host_logits[: len(step.host_rows)].clone() if step.host_rows else None
        prompt_logprobs = self._prompt_logprobs.copy(scores, buffers.done)

        def read_logprobs(row: int, token: int, num_top: int) -> TokenLogprobs:
            assert buffers.logprobs is not None
            return edits.read_logprobs(buffers.logprobs.numpy(), row, token, num_top)

        outcomes, tokens, computed = buffers.results
        results = outcomes, tokens, computed
        done = buffers.done if self.decodes.mirror is None else self.decodes.mirror.checked(buffers.done)
        return LaunchedStep(results, done, stored, read_logprobs, host_logits, prompt_logprobs)

    def _launch_prefill(self, step: StepRequest) -> tuple[StepBuffers, Sequence[StoredLayers], Sequence[ScoredRows]]:
        """Launches a step with prefill, as a CUDA graph if one fits. The result has its layers if it sends blocks."""
        rows, scored = step.rows, step.scored
        table, descriptor = (
            self._batch.slots,
            self.prefills.descriptor(
                rows, keeps_hidden=bool(scored), is_adapted=self._batch.slots.are_adapted(rows.slots)
            ),
        )
        num_decodes, stored = descriptor.num_decodes, list[StoredLayers]()
        # latent layers decompress cached tokens in pieces, whose number a graph cannot follow; none measures scales
        pool = self.decodes.pool
        is_captured = not pool.scales_pending and not (pool.shape.has_latent and max_context(rows, table))
        vectors = self._batch.input_vectors(*token_rows(rows, table), num_decodes)
        # the kernels of such steps are launched one by one
        is_captured = is_captured and not descriptor.is_adapted and vectors is None
        graph = self.graphs.find(descriptor) if is_captured else None
        if graph is not None:
            descriptor = graph.descriptor
            buffers = self._begin(step, descriptor.num_decodes)
            graph.run(buffers, rows, table, step.needs_processing)
            hidden = graph.hidden
            if step.sends and self.layer_words is not None:
                stored = self.layer_words.stored(self.decodes.ring.step)
        else:
            buffers = self._begin(step, num_decodes)
            events = LayerEvents(pool.shape.num_layers) if step.sends else None
            prefill = self.prefills.prepare(buffers, descriptor, rows, table, events, vectors)
            output = prefill.forward()
            prefill.sample(output, step.needs_processing)
            hidden = output.hidden
            if events is not None:
                stored = events.stored
        self._send_changes(rows.slots, descriptor.num_seqs)
        if hidden is None:
            return buffers, stored, ()
        padding = descriptor.num_decodes - num_decodes
        return buffers, stored, self._prompt_logprobs.compute_rows(scored, hidden, num_decodes, padding)

    def _send_changes(self, slots: Ints, num_rows: int) -> None:
        """Sends followers what the step that is launched changes. num_rows: with padding."""
        if self.decodes.changes is not None:
            self.decodes.changes.after_step(self.decodes.ring.step, slots, num_rows)

    def _size(self, slots: Ints) -> DecodeSize:
        table = self._batch.slots
        longest, is_adapted = int(table.num_computed[slots].max()) + 1, table.are_adapted(slots)
        if self._is_eager:
            return self.decodes.exact(len(slots), longest, is_adapted)
        return self.decodes.padded(max(len(slots), self._least_rows), longest, is_adapted)

    def _begin(self, step: StepRequest, num_rows: int) -> StepBuffers:
        """Brings the device's state up to date. num_rows: rows of decodes, with padding."""
        table, steps = self._batch.slots, self.decodes
        slots, counts, num_decodes = step.rows.slots, step.rows.counts, step.rows.num_decodes
        decodes = step.rows.decodes
        positions, size = table.num_computed[slots], table.block_size
        self._batch.block_hashes.invalidate(table.tables[decodes, positions[:num_decodes] // size])
        for slot, begin, count in zip(slots[num_decodes:], positions[num_decodes:], counts[num_decodes:], strict=True):
            self._batch.block_hashes.invalidate(table.tables[slot, begin // size : -(-(begin + count) // size)])
        steps.slots.send_next_tokens(decodes[positions[:num_decodes] < table.num_start_tokens[decodes]], table)
        buffers = steps.ring.take()
        steps.slots.assign(decodes, num_rows)
        if not num_rows:
            steps.slots.count_step(steps.ring.step)
        index, values = steps.slots.take()
        if steps.changes is not None:
            steps.changes.before_step(steps.ring.step, decodes, index)
        if len(index):
            buffers.write(index, values)
            steps.ops.scatter(steps.slots.state.arena, buffers.pairs, len(index))
            if steps.mirror is not None:
                steps.mirror.scatter(index, values)
        return buffers


def graph_bytes(
    model: Model, need: KVMemoryNeed, dtype: torch.dtype, logits_edits: bool, captures: bool, has_adapters: bool = False
) -> tuple[int, int]:
    """Bytes that buffers and graphs of all steps will need, and bytes that edits of logits need besides; cuda only.

    Measured on the largest decode step. captures: False: there will be no graphs, and other buffers are small.
    """
    edits = edits_bytes(need.max_num_seqs, model.shape.vocab_size) if logits_edits else 0
    if not captures:
        return 0, edits
    graphs = decode_graphs.graph_bytes(model, need, dtype, logits_edits, has_adapters)
    return graphs - edits + MOST_BYTES, edits


def start(
    batch: Batch,
    model: Model,
    pool: KVPool,
    geometry: Geometry,
    config: WorkerConfig,
    tuning: IdleTuning | None = None,
    mirror: DeviceMirror | None = None,
) -> CudaSteps:
    """mirror: of a leader. Raises LoadError for a model that the kernels do not support."""
    settings = DecodeSettings(
        capacity=geometry.max_num_seqs,
        max_model_len=geometry.max_model_len,
        eos_token_ids=geometry.eos_token_ids,
        graph_sizes=config.graph_sizes,
        logits_edits=config.run_ahead_penalties,
        num_extra_tokens=geometry.num_extra_tokens,
        serves_adapters=config.lora is not None,
        masks=share_masks(batch.matchers, num_mask_slots(geometry.max_num_seqs), geometry.vocab_size, model.table.link),
    )
    decodes = DecodeSteps(model, pool, settings, make_device_ops(pool, config.fused_steps), mirror=mirror)
    if not pool.batch_invariant:
        compile_prefills(pool, model.table.dtype)
    most_tokens = min(geometry.max_num_batched_tokens, geometry.max_model_len)
    return CudaSteps(decodes, batch, most_tokens, tuning, sends_prefills(config))


def sends_prefills(config: WorkerConfig) -> bool:
    """Whether this worker's prefills are usually for another worker.

    A decode worker computes prompts for others only while no prefill worker lives. Blocks leave at the end
    of its CUDA graphs then.
    """
    return config.kv_transfer is not None and config.kv_transfer.role is not KVRole.DECODE
