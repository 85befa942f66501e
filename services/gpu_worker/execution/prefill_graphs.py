"""CUDA graphs of steps with prefill: their kernels may be over sooner than the host can launch them.

A step is padded in rows of decodes, in tokens of prompts and in the number of prompts; everything else its kernels read
from words on the device, which each step brings up to date. Sizes are captured at the start and in idle times, and
beside steps that keep missing one: see `prefill_sizes`.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.execution.decode_graphs import DecodeSteps
from blockyard.services.gpu_worker.execution.pinned_ring import StepBuffers
from blockyard.services.gpu_worker.execution.prefill_sizes import GraphCost, PrefillGraphSizes
from blockyard.services.gpu_worker.execution.prefill_steps import BatchDescriptor, PrefillStep, clear, fill
from blockyard.services.gpu_worker.slots import Slots

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

START_S = 0.5  # spent before the worker is ready
FEWEST = 2  # sizes by then: of a small model they hold every step


class Replay(Protocol):
    """As `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    """One size."""

    descriptor: BatchDescriptor
    words: Tensor  # that it reads
    forward: Replay
    samples: tuple[Replay, ...]  # of slots that ask for nothing but a draw, and of others, where some can

    def run(self, entry: StepBuffers, slots: Ints, counts: Ints, table: Slots, needs_processing: bool) -> None:
        """As `PrefillStep`: its forward pass, and what follows."""
        words = entry.words(len(self.words))
        fill(words, self.descriptor, slots, counts, table)
        self.words.copy_(words, non_blocking=True)
        self.forward.replay()
        self.samples[needs_processing].replay()


@dataclass(frozen=True, slots=True)
class CapturedPrefill:
    graph: PrefillGraph
    measured: GraphCost


class GraphRecorder(Protocol):
    def record(self, descriptor: BatchDescriptor) -> CapturedPrefill:
        """Captures one size. Raises RuntimeError where there is no memory, or no CUDA."""


class PrefillGraphs:
    """On the slots, buffers and kernels of the decode steps."""

    def __init__(self, steps: DecodeSteps, most_tokens: int, recorder: GraphRecorder | None = None) -> None:
        """most_tokens: of a step. recorder: None captures on the GPU."""
        self._steps, self._recorder = steps, recorder or CudaGraphRecorder(steps)
        self._graphs: dict[BatchDescriptor, PrefillGraph] = {}
        self._sizes = PrefillGraphSizes(steps.capacity, most_tokens, steps.padded_num_seqs)
        self._took_s = 0.0
        self._enabled = False
        self._problem = ""  # why there are none

    def find(self, step: BatchDescriptor) -> PrefillGraph | None:
        """What computes such a step; None: it is to be launched kernel by kernel.

        Captures a size where steps have lost as much time without it as that takes, so that all of a worker's steps
        together lose twice as much at most, however busy it is.
        """
        if not self._graphs:
            return None
        wanted = self._sizes.size_to_capture(step)
        if wanted is not None:
            self._capture(wanted)
        size = self._sizes.pick(step)
        return None if size is None else self._graphs.get(size)  # there are none any more if that capture failed

    def capture(self) -> None:
        """As many as START_S allows, the others when `capture_one` is called."""
        self._enabled, start = True, time.perf_counter()
        while len(self._graphs) < FEWEST or time.perf_counter() - start < START_S:
            if not self.capture_one():
                break

    @property
    def captured(self) -> float:
        """The part of the sizes that were tried; 1.0 where there are to be none."""
        return self._sizes.captured if self._enabled else 1.0

    def describe(self) -> str:
        """What there is of graphs, in a line."""
        if self._problem:
            return f"CUDA graphs of prefills: none: {self._problem}"
        missing, most = len(self._sizes.missing), max((one.num_prefill_tokens for one in self._graphs), default=0)
        left = f", up to {missing} more when idle or missed" if missing else ""
        return (
            f"CUDA graphs of prefills: {len(self._graphs)} of up to {most} tokens in {self._took_s:.1f} s, "
            f"{self._sizes.num_bytes / 2**30:.2f} GiB{left}"
        )

    def capture_one(self) -> bool:
        """A size that is still missing; False: none is left, or there are to be none."""
        size = self._sizes.next() if self._enabled else None
        if size is not None:
            self._capture(size)
        return self._enabled and bool(self._sizes.missing)

    def _capture(self, size: BatchDescriptor) -> None:
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                done = self._recorder.record(size)
            self._graphs[size] = done.graph
            took_s = time.perf_counter() - start
            self._took_s += took_s
            self._sizes.add_captured(size, done.measured, took_s)
            log.debug("%s captured in %.3f s: %s", size, took_s, done.measured)
        except RuntimeError as e:  # OutOfMemoryError and CUDA's own are among them
            self._graphs.clear()
            self._sizes.missing.clear()
            torch.cuda.empty_cache()
            self._problem = str(e).splitlines()[0]
            log.warning("steps with prefill are eager, CUDA graphs could not be captured: %s", self._problem)
        self._steps.slots.count_step(self._steps.ring.step)  # the device has counted the trials


class CudaGraphRecorder:
    """Steps may be in flight meanwhile: trials touch no slot, and their results go to the place of the next step's."""

    def __init__(self, steps: DecodeSteps) -> None:
        self._steps, self._device = steps, steps.pool.device
        is_cuda = self._device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None  # type: ignore[no-untyped-call]

    def record(self, descriptor: BatchDescriptor) -> CapturedPrefill:
        host = torch.empty(sum(descriptor.parts), dtype=torch.int64)
        clear(host, descriptor)
        words = host.to(self._device)
        step = PrefillStep(self._steps, descriptor, words)
        ways = (False, True) if self._steps.slots.logits_edits.enabled else (False,)
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._begin(descriptor)
        due = step.forward()
        for needs_processing in ways:
            step.sample(due, needs_processing)  # compiles and loads what it needs
        torch.cuda.synchronize(self._device)
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - held
        before = torch.cuda.memory_reserved(self._device)
        forward, samples = torch.cuda.CUDAGraph(), tuple(torch.cuda.CUDAGraph() for _ in ways)
        start = time.perf_counter()
        with self._recorded(forward):
            due = step.forward()
            launch_s = time.perf_counter() - start
        for needs_processing, sample in zip(ways, samples, strict=True):
            with self._recorded(sample):
                step.sample(due, needs_processing)
        num_bytes = torch.cuda.memory_reserved(self._device) - before
        for _ in range(2):  # the first one takes the graph to the device
            self._begin(descriptor)
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            forward.replay()
            samples[0].replay()
            torch.cuda.synchronize(self._device)
        # What it has left in the pool may be overwritten by other graphs: none runs between forward pass and sampling.
        measured = GraphCost(launch_s, time.perf_counter() - start, num_bytes, peak_bytes)
        return CapturedPrefill(PrefillGraph(descriptor, words, forward, samples), measured)

    def _begin(self, descriptor: BatchDescriptor) -> None:
        """A trial: all rows pad, and whether it counts itself or not, it is the step after the last one."""
        slots, last = self._steps.slots, self._steps.ring.step
        slots.clear_rows()
        slots.state.step.fill_(last if descriptor.num_decodes else last + 1)

    @contextlib.contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """`torch.cuda.graph` gives back all memory that is free, and the steps that follow have to ask for it again."""
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
