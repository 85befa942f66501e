"""CUDA graphs of steps with prefill: launching their kernels may take the host longer than the device runs.

A step is padded to a size: rows of decodes, tokens and number of prompts. Its kernels read everything else from words
on the device, which each step rewrites. Sizes are captured at the start and in idle times, those first that steps have
missed: see `prefill_sizes`. None is captured beside steps, because streams would wait for it.
"""

import logging
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.int_math import wrap_int32
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import (
    SAMPLE_VARIANTS,
    DecodeSteps,
    MirroredReplay,
    Replay,
)
from blockyard.services.gpu_worker.execution.cuda.graph_pool import GraphPool
from blockyard.services.gpu_worker.execution.cuda.prefill_sizes import GraphCost, PrefillGraphSizes
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import (
    BatchDescriptor,
    PrefillStep,
    host_words,
    write_step,
    write_trial,
)
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerWords
from blockyard.services.gpu_worker.execution.pinned_ring import StepBuffers
from blockyard.services.gpu_worker.slots import Slots, StepRows

log = logging.getLogger(__name__)


START_S = 1.5  # spent before the worker is ready
FEWEST = 3  # sizes at least; of a small model they cover every step


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    """The graphs of one size."""

    descriptor: BatchDescriptor
    words: Tensor  # input of the graphs
    forward: Replay
    samples: tuple[Replay, ...]  # by the order of SAMPLE_VARIANTS
    hidden: Tensor | None = None  # output of `forward`: `SamplerInput.hidden`

    def run(self, buffers: StepBuffers, step: StepRows, table: Slots, needs_processing: bool) -> None:
        """Fills the words, then replays forward pass and sampling."""
        words = buffers.words(len(self.words))
        write_step(words, self.descriptor, step, table)
        self.words.copy_(words, non_blocking=True)
        self.replay(words, needs_processing)

    def replay(self, host: Tensor, needs_processing: bool) -> None:
        """Replays forward pass and sampling. host: what `words` has, in host memory: followers get it with each replay,
        and what theirs had before is another step, or nothing."""
        if isinstance(self.forward, MirroredReplay):
            num_logits = None if self.descriptor.keeps_hidden else self.descriptor.num_seqs
            self.forward.replay(host_words(host, self.descriptor, num_logits))
        else:
            self.forward.replay()
        self.samples[needs_processing].replay()


@dataclass(frozen=True, slots=True)
class CapturedPrefill:
    graph: PrefillGraph
    measured: GraphCost


class GraphRecorder(Protocol):
    def record(self, descriptor: BatchDescriptor) -> CapturedPrefill:
        """Captures one size. Raises RuntimeError without enough memory, or without CUDA."""


class PrefillGraphs:
    """Owns the graphs; they use slots, buffers and kernels of the decode steps."""

    def __init__(self, steps: DecodeSteps, most_tokens: int, recorder: GraphRecorder) -> None:
        """most_tokens: of a step."""
        self._steps, self._recorder = steps, recorder
        self._graphs: dict[BatchDescriptor, PrefillGraph] = {}
        self._sizes = PrefillGraphSizes(steps.capacity, most_tokens, steps.padded_num_seqs)
        self._took_s = 0.0
        self._enabled = False
        self.capture_error = ""  # why capturing failed

    def find(self, step: BatchDescriptor) -> PrefillGraph | None:
        """The graph for such a step; None: launch it kernel by kernel."""
        if not self._graphs:
            return None
        self._sizes.on_step(step)
        size = self._sizes.pick(step)
        return None if size is None else self._graphs[size]

    def capture(self) -> None:
        """Captures sizes for START_S seconds; `capture_one` captures the others."""
        self._enabled, start = True, time.perf_counter()
        while len(self._graphs) < FEWEST or time.perf_counter() - start < START_S:
            if not self.capture_one():
                break

    @property
    def captured(self) -> float:
        """The fraction of sizes that were tried; 1.0 where graphs are off."""
        return self._sizes.captured if self._enabled else 1.0

    def describe(self) -> str:
        """Number and memory of graphs, in one line."""
        if self.capture_error:
            return f"CUDA graphs of prefills: none: {self.capture_error}"
        if not self._enabled:
            return "CUDA graphs of prefills: none, replicas compute prompts of different sizes"
        missing, most = len(self._sizes.missing), max((one.num_prefill_tokens for one in self._graphs), default=0)
        left = f", up to {missing} more when idle" if missing else ""
        return (
            f"CUDA graphs of prefills: {len(self._graphs)} of up to {most} tokens in {self._took_s:.1f} s, "
            f"{self._sizes.num_bytes / 2**30:.2f} GiB{left}"
        )

    def capture_one(self) -> bool:
        """Captures one missing size. False: none is left, or graphs are off."""
        size = self._sizes.next() if self._enabled else None
        if size is not None:
            self._capture(size)
        return self._enabled and self._sizes.captured < 1.0

    def _capture(self, size: BatchDescriptor) -> None:
        start = time.perf_counter()
        try:
            with torch.inference_mode(), self._steps.pool.trial_steps():
                done = self._recorder.record(size)
            self._graphs[size] = done.graph
            self._took_s += time.perf_counter() - start
            self._sizes.add_captured(size, done.measured)
            log.debug("%s captured: %s", size, done.measured)
        except RuntimeError as e:  # includes OutOfMemoryError and CUDA errors
            self._graphs.clear()
            self._sizes.give_up()
            torch.cuda.empty_cache()
            self.capture_error = str(e).splitlines()[0]
            log.warning("steps with prefill are eager, CUDA graphs could not be captured: %s", self.capture_error)
        self._steps.slots.count_step(self._steps.ring.step)  # the device has counted the trial steps


class CudaGraphRecorder:
    """Captures on the GPU while no step is in flight. Trials touch no slot, and have the number of the last step, whose
    results were read."""

    def __init__(self, steps: DecodeSteps, layer_words: LayerWords | None = None) -> None:
        """layer_words: that the graphs write; None: they do not tell which layers are stored."""
        self._steps, self._device, self._layer_words = steps, steps.pool.device, layer_words
        self._stream = steps.link.stream()
        self._pool = GraphPool()

    def record(self, descriptor: BatchDescriptor) -> CapturedPrefill:
        host = torch.empty(sum(descriptor.parts), dtype=torch.int64)
        write_trial(host, descriptor, self._steps.pool.shape.vocab_size)
        words = host.to(self._device)
        step = PrefillStep(self._steps, descriptor, words, layers=self._layer_words, host=host)
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._begin(descriptor)
        sampler_input = step.forward()
        for needs_processing in SAMPLE_VARIANTS:
            step.sample(sampler_input, needs_processing)  # compiles and loads its kernels
        torch.cuda.synchronize(self._device)
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - held
        before = torch.cuda.memory_reserved(self._device)
        forward, samples = torch.cuda.CUDAGraph(), tuple(torch.cuda.CUDAGraph() for _ in SAMPLE_VARIANTS)
        start = time.perf_counter()
        with self._steps.capturing(forward) as replay, self._pool.capturing_on(self._stream, forward):
            sampler_input = step.forward()
            launch_s = time.perf_counter() - start
        for needs_processing, sample in zip(SAMPLE_VARIANTS, samples, strict=True):
            with self._pool.capturing_on(self._stream, sample):
                step.sample(sampler_input, needs_processing)
        num_bytes = torch.cuda.memory_reserved(self._device) - before
        graph = PrefillGraph(descriptor, words, replay, samples, sampler_input.hidden)
        for _ in range(2):  # the first replay uploads the graph
            self._begin(descriptor)
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            graph.replay(host, needs_processing=False)
            torch.cuda.synchronize(self._device)
        # Other graphs may overwrite its output in the pool: none runs between forward pass and sampling.
        measured = GraphCost(launch_s, time.perf_counter() - start, num_bytes, peak_bytes)
        return CapturedPrefill(graph, measured)

    def _begin(self, descriptor: BatchDescriptor) -> None:
        """Prepares a trial: all rows are padding, and it has the number of the last step."""
        self._steps.clear_rows()
        state, last = self._steps.slots.state, self._steps.ring.step
        state.step.fill_(wrap_int32(last - 1 if descriptor.num_decodes else last))  # gathering rows adds 1
