"""Steps in which every sequence computes one token, on the slots of the GPU, as CUDA graphs.

A size has two graphs: `forward` from the slots' next tokens to the logits, and `sample` from the logits to the slots'
new state. A second graph of `sample` is for steps with penalties, edits of tokens or log-probabilities. Imports Triton.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.slots.slot_state import Field, SlotState, StepInputs
from blockyard.services.gpu_worker.attention.choice import check_head_sizes
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.execution.cuda.device_masks import SlotMasks
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.execution.cuda.graph_pool import GraphPool
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerRecorder
from blockyard.services.gpu_worker.execution.device_slots import SLOTS, DeviceSlots
from blockyard.services.gpu_worker.execution.pinned_ring import PinnedRing
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceAttend, DeviceMirror
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.adapter_rows import NO_PLACE
from blockyard.services.gpu_worker.memory import KVMemoryNeed, blocks_of
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.step import Attend, Step
from blockyard.shared.config.services.worker import capture_sizes

log = logging.getLogger(__name__)

IN_FLIGHT = 8  # steps at most
MEASURED = 5
CAPTURE_S = 3.0  # spent on graphs before the worker is ready
SAMPLE_VARIANTS = (False, True)  # values of `needs_processing`: each has kernels and a graph
GRAPH_BYTES = 24 << 20  # of three graphs without their tensors; an upper bound of measurements


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """The size that a decode step is padded to."""

    rows: int  # the last ones may be padding
    short_context: bool  # no sequence is longer than `DeviceOps.fused_decode_max_len`
    is_adapted: bool = False  # a sequence has an adapter


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of a forward pass, overwritten by the next one."""

    hidden: Tensor  # [rows, hidden]
    logits: Tensor  # [rows, vocab_size], wider where adapters add tokens

    def first(self, rows: int) -> "ForwardOutput":
        return ForwardOutput(self.hidden[:rows], self.logits[:rows])


class Replay(Protocol):
    """The part of `torch.cuda.CUDAGraph` that is used here."""

    def replay(self) -> None: ...


class MirroredReplay:
    """A graph of a leader: followers replay theirs first."""

    def __init__(self, graph: Replay, key: int, mirror: DeviceMirror) -> None:
        self._graph, self._key, self._mirror = graph, key, mirror

    def replay(self, words: bytes = b"") -> None:
        """words: see `ReplayGraph`."""
        self._mirror.replay(self._key, words)
        self._graph.replay()

    def drop(self) -> None:
        """Lets followers free theirs."""
        self._mirror.drop(self._key)


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    forward: Replay
    output: ForwardOutput
    samples: list[torch.cuda.CUDAGraph]  # by the order of SAMPLE_VARIANTS


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """Limits and features of the steps on a GPU."""

    capacity: int  # sequences of a step
    max_model_len: int
    eos_token_ids: list[int]
    graph_sizes: list[int] = field(default_factory=list)  # rows; empty: `capture_sizes`
    logits_edits: bool = False  # see `DeviceSlots`
    masks: SlotMasks | None = None  # of structured output; None: the host samples slots with a constraint
    num_extra_tokens: int = 0  # that adapters may add behind the vocabulary
    serves_adapters: bool = False  # steps with adapters have graphs of their own


class DecodeSteps:
    """Decode steps of up to `capacity` sequences, in slots below SLOTS * capacity. Owns their CUDA graphs."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        settings: DecodeSettings,
        ops: DeviceOps | None = None,
        ring: PinnedRing | None = None,
        mirror: DeviceMirror | None = None,
    ) -> None:
        """mirror: of a leader; None: there is one rank. Raises LoadError for a head size that the kernels do not
        support."""
        self.mirror = mirror
        check_head_sizes("cuda", pool.shape.attention)
        self.capacity, self.ops = settings.capacity, ops or DeviceOps()
        capacity, max_model_len, eos_token_ids = settings.capacity, settings.max_model_len, settings.eos_token_ids
        device, vocab, self.link = pool.device, pool.shape.vocab_size, model.table.link
        state = SlotState.make(SLOTS * capacity, capacity, blocks_of(max_model_len, pool.block_size), device)
        masks = settings.masks
        owner_of = None if masks is None else masks.owner_of
        edits, num_extra = settings.logits_edits, settings.num_extra_tokens
        self.slots = DeviceSlots(state, SLOTS * capacity, vocab, eos_token_ids, self.link, edits, owner_of, num_extra)
        self.changes = None if mirror is None else mirror.send_changes(state)
        self.ring = ring or PinnedRing(IN_FLIGHT, capacity, self.link)
        self.model, self.pool = model, pool
        self._inputs = StepInputs.make(capacity, device)
        self._tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._best = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.ready = torch.ones(capacity, dtype=torch.int32, device=device)  # 0: the row's slot waits a step
        self._masks = None if masks is None else masks.rows(state, capacity)
        self._eos = torch.tensor([i for i in eos_token_ids if 0 <= i < vocab], dtype=torch.int32, device=device)
        self._capture_sizes = [n for n in settings.graph_sizes if n <= capacity] or capture_sizes(capacity)
        self._sizes = [
            size for rows in capture_order(self._capture_sizes) for size in self._decode_sizes(rows, max_model_len)
        ]
        if settings.serves_adapters:  # behind the others, which they leave as they are
            self._sizes += [replace(size, is_adapted=True) for size in self._sizes]
        self._graphs: dict[DecodeSize, CapturedGraphs] = {}
        self._missing: list[DecodeSize] = []  # not captured yet
        self._graph_pool = GraphPool()
        self.capture_error = ""  # why there are no graphs
        self._capture_s, self._graphs_bytes = 0.0, 0

    def _decode_sizes(self, rows: int, max_model_len: int) -> list[DecodeSize]:
        max_len = self.ops.fused_decode_max_len(rows)
        return [
            *([DecodeSize(rows, False)] if max_len < max_model_len else []),
            *([DecodeSize(rows, True)] if max_len else []),
        ]

    def padded(self, rows: int, max_seq_len: int, is_adapted: bool = False) -> DecodeSize:
        """The size that so many rows are padded to, with no sequence longer than `max_seq_len`.

        is_adapted: a sequence has an adapter.
        """
        fitting = (
            one
            for one in self._graphs
            if one.is_adapted == is_adapted
            and one.rows >= rows
            and (not one.short_context or max_seq_len <= self.ops.fused_decode_max_len(one.rows))
        )
        return min(
            fitting,
            key=lambda one: (one.rows, not one.short_context),
            default=self.exact(rows, max_seq_len, is_adapted),
        )

    def exact(self, rows: int, max_seq_len: int, is_adapted: bool = False) -> DecodeSize:
        """The size without padding."""
        return DecodeSize(rows, max_seq_len <= self.ops.fused_decode_max_len(rows), is_adapted)

    def padded_num_seqs(self, rows: int) -> int:
        """The smallest capture size for so many rows. Kernels are compiled for these sizes."""
        return next((n for n in self._capture_sizes if n >= rows), self.capacity)

    def forward(self, size: DecodeSize, *, is_eager: bool = False) -> ForwardOutput:
        """Computes the next token of the slots in the first rows. `size` is from `padded`, or `is_eager`: without a
        graph, if it has one."""
        captured = None if is_eager else self._graphs.get(size)
        if captured is None:
            return self._forward(size)
        captured.forward.replay()
        return captured.output

    def sample(
        self, size: DecodeSize, output: ForwardOutput, needs_processing: bool, *, is_eager: bool = False
    ) -> None:
        """Samples from the output of `forward`: slots go on or end, and the ring gets their results.

        needs_processing: a slot has penalties, edits of tokens, or reports log-probabilities, or the host samples it.
        """
        captured = None if is_eager else self._graphs.get(size)
        if captured is None:
            self._sample(size.rows, output, needs_processing)
        else:
            captured.samples[needs_processing].replay()

    def _forward(self, size: DecodeSize) -> ForwardOutput:
        inputs, state = self._inputs.first(size.rows), self.slots.state
        self.ops.gather_inputs(state, inputs)
        rows = PagedKVMetadata(inputs.slots, inputs.positions, state.tables)
        max_seq_len = self.ops.fused_decode_max_len(size.rows) if size.short_context else None
        attend = self.attend(AttentionMetadata(rows, max_seq_len=max_seq_len), size.rows)
        self.begin_adapters(inputs.slots, is_adapted=size.is_adapted)
        hidden = self.model.forward(Step(inputs.token_ids, inputs.positions, attend))
        return ForwardOutput(hidden, self.model.logits(hidden))

    def attend(
        self,
        metadata: AttentionMetadata,
        num_gathered: int,
        layers: LayerRecorder | None = None,
        words: bytes = b"",
    ) -> Attend:
        """Builds the attention of a step, of a leader with what followers need to build theirs.

        layers: records which layers are stored. num_gathered, words: see `DeviceForward`.
        """
        attend = self.ops.attend(self.pool, metadata)
        if layers is not None:
            attend = layers.around(attend)
        if self.mirror is None:
            return attend
        return DeviceAttend(
            attend,
            metadata,
            num_gathered,
            words,
            scales_pending=self.pool.scales_pending,
            records_layers=layers is not None,
        )

    @contextmanager
    def capturing(self, graph: Replay) -> Iterator[Replay]:
        """What the model computes is captured in `graph`, which the caller begins. Returns what replays it."""
        if self.mirror is None:
            yield graph
            return
        with self.mirror.capturing() as key:
            yield MirroredReplay(graph, key, self.mirror)

    def begin_adapters(self, slots: Tensor, *, is_adapted: bool) -> None:
        """Tells the model which adapter each row has. slots [rows] int64, below 0: padding. Part of CUDA graphs."""
        begin_adapters(self.model, self.slots.state, slots if is_adapted else None)

    def _sample(self, rows: int, output: ForwardOutput, needs_processing: bool) -> None:
        self.sample_rows(self._inputs.first(rows), output.logits, needs_processing)

    def sample_rows(
        self, inputs: StepInputs, logits: Tensor, needs_processing: bool, counts: Tensor | None = None
    ) -> None:
        """Samples a token for each row's slot. counts: tokens that each row computed, None: one each."""
        count, edits = len(logits), self.slots.logits_edits
        tokens, best, ready = self._tokens[:count], self._best[:count], self.ready[:count]
        edited = needs_processing and edits.enabled
        adjusted = edits.adjusted(logits.shape[1]) if edited else None
        masked = self._masks.first(count) if self._masks is not None and edited else None
        if masked is not None:
            self.ops.wait_for_masks(inputs, masked)
            ready = masked.states  # of a row that waits 0, as MaskState.MISSING
        if edited:
            self.ops.penalize(logits, inputs, edits.tensors, masked)
        self.ops.sample(logits, inputs, self.slots.params, tokens, best, adjusted)
        if masked is not None:
            self.ops.publish_sampled(tokens, best, inputs, masked)
        if edited:
            self.ops.count_tokens(tokens, best, ready, inputs, edits.tensors)
            buffers = edits.logprob_buffers(count)
            self.ops.gather_logprobs(logits, inputs.sampled_slots, tokens, edits.num_top, buffers)
        if needs_processing:
            self.ops.copy_logits(logits, inputs, edits.host_row, edits.host_logits)
        self._advance(inputs, ready, counts)

    def advance(self, inputs: StepInputs, counts: Tensor) -> None:
        """Advances each row's slot by `counts` tokens, where no slot samples."""
        self._advance(inputs, self.ready[: len(counts)], counts)

    def _advance(self, inputs: StepInputs, ready: Tensor, counts: Tensor | None) -> None:
        state, tokens, best = self.slots.state, self._tokens[: len(ready)], self._best[: len(ready)]
        self.ops.advance(state, inputs, tokens, best, ready, self._eos, self.ring.results, counts)
        if self.changes is not None:
            self.ops.collect_changes(state, inputs.slots, self.changes.words)

    def clear_rows(self) -> None:
        """Makes all rows padding, on all ranks: trial steps touch no KV then."""
        self.slots.clear_rows()
        if self.mirror is not None:
            rows = self.slots.state.row_slots
            index = np.arange(len(rows), dtype=np.int32) + self.slots.state.offset(rows)
            self.mirror.scatter(index, np.full(len(rows), -1, np.int32))

    def capture(self, most_s: float = CAPTURE_S) -> None:
        """Captures sizes for so many seconds; `capture_one` captures the others."""
        start = time.perf_counter()
        self._missing = list(self._sizes)
        while time.perf_counter() - start < most_s and self.capture_one():
            pass

    @property
    def captured(self) -> float:
        """The fraction of sizes with a graph; 1.0 if capturing failed."""
        return 1.0 - len(self._missing) / len(self._sizes)

    def describe(self) -> str:
        """Number and memory of graphs, in one line."""
        if self.capture_error:
            return f"CUDA graphs: none, decode steps are eager: {self.capture_error}"
        left = f", {len(self._missing)} more when idle" if self._missing else ""
        took, size = self._capture_s, self._graphs_bytes / 2**30
        return f"CUDA graphs: {len(self._graphs)} of up to {self.capacity} rows in {took:.1f} s, {size:.2f} GiB{left}"

    def capture_one(self) -> bool:
        """Captures one size. False: none is left. After an error all steps are eager."""
        if not self._missing:
            return False
        size = self._missing.pop(0)
        start, before = time.perf_counter(), torch.cuda.memory_reserved(self.pool.device)
        try:
            with torch.inference_mode():
                self._graphs[size] = self._capture(size)
            self._capture_s += time.perf_counter() - start
            self._graphs_bytes += torch.cuda.memory_reserved(self.pool.device) - before
        except RuntimeError as e:  # includes OutOfMemoryError and CUDA errors
            self._graphs.clear()
            self._missing.clear()
            torch.cuda.empty_cache()
            self.capture_error = str(e).splitlines()[0]
            log.warning("CUDA graphs could not be captured, decode steps are eager: %s", self.capture_error)
        self.slots.count_step(self.ring.step)  # the device has counted the trial step
        return bool(self._missing)

    def capture_again(self, rows: int) -> None:
        """Drops the graphs of a size after its kernels have changed; `capture_one` makes new ones."""
        for size in [one for one in self._graphs if one.rows == rows]:
            forward = self._graphs.pop(size).forward
            if isinstance(forward, MirroredReplay):
                forward.drop()
            self._missing.append(size)

    @property
    def sizes(self) -> list[DecodeSize]:
        """All sizes that may have graphs."""
        return list(self._sizes)

    def _capture(self, size: DecodeSize) -> CapturedGraphs:
        self.clear_rows()
        output = self._forward(size)
        for needs_processing in SAMPLE_VARIANTS:
            self._sample(size.rows, output, needs_processing)  # compiles and loads its kernels
        torch.cuda.synchronize(self.pool.device)
        forward, samples = torch.cuda.CUDAGraph(), [torch.cuda.CUDAGraph() for _ in SAMPLE_VARIANTS]
        with self.capturing(forward) as replay, self._graph_pool.capturing(forward):
            output = self._forward(size)
        for needs_processing, sample in zip(SAMPLE_VARIANTS, samples, strict=True):
            with self._graph_pool.capturing(sample):
                self._sample(size.rows, output, needs_processing)
        return CapturedGraphs(replay, output, samples)

    def measure(self) -> float:
        """Seconds of a step of the smallest size with a padding row, the best of a few."""
        size, best = self.padded(1, 1), float("inf")
        for _ in range(MEASURED):
            torch.cuda.synchronize(self.pool.device)
            start = time.perf_counter()
            self.sample(size, self.forward(size), needs_processing=False)
            torch.cuda.synchronize(self.pool.device)
            best = min(best, time.perf_counter() - start)
        return best


def begin_adapters(model: Model, state: SlotState, slots: Tensor | None) -> None:
    """Tells a model which adapter each row has. slots [rows] int64, below 0: padding; None: no row has one."""
    if slots is None:
        model.adapter_rows.end()
        return
    places = state.fields[Field.ADAPTER].index_select(0, slots.clamp(min=0)) - 1
    model.adapter_rows.begin(places.masked_fill(slots < 0, NO_PLACE))


def num_mask_slots(capacity: int) -> int:
    """Slots that need masks: `SlotState` rounds them up."""
    return -(-SLOTS * capacity // 16) * 16


def capture_order(sizes: list[int]) -> list[int]:
    """The largest first, because the others reuse its memory; then the middle of the rest, and of its halves, so that
    padding stays small while sizes are missing."""
    order, parts = [sizes[-1]], [sizes[:-1]]
    while parts:
        part = parts.pop(0)
        if part:
            middle = len(part) // 2
            order.append(part[middle])
            parts += [part[:middle], part[middle + 1 :]]
    return order


def graph_bytes(
    model: Model, need: KVMemoryNeed, dtype: torch.dtype, logits_edits: bool, has_adapters: bool = False
) -> int:
    """Bytes that buffers and graphs of `DecodeSteps` will need, measured on its largest step; cuda only."""
    device, capacity = model.table.device, need.max_num_seqs
    masks = SlotMasks.unused(num_mask_slots(capacity), model.shape.vocab_size, device)  # later they are on the host
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    pool = KVPool(model.shape, 1, need.block_size, dtype, device, need.batch_invariant)
    settings = DecodeSettings(
        capacity=capacity, max_model_len=need.max_model_len, eos_token_ids=[0], logits_edits=logits_edits, masks=masks
    )
    steps = DecodeSteps(model, pool, settings)
    size = steps.padded(capacity, need.max_model_len)
    output = steps.forward(size)
    steps.sample(size, output, needs_processing=True)
    row_bytes = (output.hidden.nbytes + output.logits.nbytes) / capacity
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    sizes = capture_sizes(capacity)
    del steps, output, settings, masks
    torch.cuda.empty_cache()
    return peak + (int(row_bytes * sum(sizes)) + GRAPH_BYTES * len(sizes)) * (2 if has_adapters else 1)
