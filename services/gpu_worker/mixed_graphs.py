"""CUDA graphs of steps with small prefills: their kernels are over sooner than the host can launch them.

A step is padded in rows of decodes, in tokens of prompts and in the number of prompts; everything else its kernels read
from words on the device, which each step brings up to date. Sizes at which the device is slower than the host gain
nothing and are left out, found by trying.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.decode_steps import DecodeSteps
from blockyard.services.gpu_worker.mixed_steps import Due, Layout, MixedStep, clear, fill
from blockyard.services.gpu_worker.pinned_ring import Entry
from blockyard.services.gpu_worker.slots import Slots

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

FIRST = (512, 128, 256, 64, 32)  # tokens of prompts alone, in the order in which they are captured
BESIDE = (512, 128, 256, 32)  # beside decodes
DECODES = (64, 16, 256, 128)  # rows of these
LATER = (1024, 192, 384, 96, 768, 2048, 1536)  # alone, where it is known whether so many are worth it
PREFILLS = 8  # prompts
BUSY = 1.15  # a step that takes so many times the host's time to launch it keeps the device busy
CAPTURE_S = 0.5  # spent before the worker is ready
MOST_BYTES = 512 << 20  # that graphs may hold; six of the 8B's held 0.11 GiB


@dataclass(frozen=True, slots=True)
class MixedGraph:
    """One size."""

    layout: Layout
    words: Tensor  # that it reads
    step: MixedStep
    due: Due
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph  # of slots that ask for nothing but a draw

    def run(self, entry: Entry, slots: Ints, counts: Ints, table: Slots, asked: bool) -> None:
        """As `MixedStep`: its forward pass, and what follows."""
        words = entry.words(len(self.words))
        fill(words, self.layout, slots, counts, table)
        self.words.copy_(words, non_blocking=True)
        self.forward.replay()
        if asked:
            self.step.sample(self.due, asked)
        else:
            self.sample.replay()


class MixedGraphs:
    """On the slots, buffers and kernels of the decode steps."""

    def __init__(self, steps: DecodeSteps, most_tokens: int) -> None:
        """most_tokens: of a step."""
        self._steps, self._device = steps, steps.pool.device
        self._graphs: list[MixedGraph] = []  # the smallest first
        self._missing = sizes(steps.capacity, most_tokens)
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._num_sizes = len(self._missing)
        self._held, self._took_s = 0, 0.0  # bytes, and the time spent
        self._enabled = False
        self._problem = ""  # why there are none

    def find(self, counts: Ints) -> MixedGraph | None:
        """The smallest one for so many tokens of each slot, ones first."""
        if not self._graphs:
            return None
        num_seqs, num_decodes = len(counts), int((counts == 1).sum())
        fresh = int(counts.sum()) - num_decodes
        for one in self._graphs:
            layout = one.layout
            if layout.decodes >= num_decodes and layout.fresh >= fresh and bool(layout.decodes) == bool(num_decodes):
                fits = num_seqs <= layout.seqs and num_seqs - num_decodes < layout.prefills
                return one if fits else None
        return None

    def capture(self) -> None:
        """As many as CAPTURE_S allows, the others when `capture_one` is called."""
        self._enabled, start = True, time.perf_counter()
        while time.perf_counter() - start < CAPTURE_S and self.capture_one():
            pass

    @property
    def captured(self) -> float:
        """The part of the sizes that were tried; 1.0 where there are to be none."""
        return 1.0 - len(self._missing) / max(self._num_sizes, 1) if self._enabled else 1.0

    def describe(self) -> str:
        """What there is of graphs, in a line."""
        if self._problem:
            return f"CUDA graphs of prefills: none: {self._problem}"
        left = f", up to {len(self._missing)} more when idle" if self._missing else ""
        most = max((one.layout.fresh for one in self._graphs), default=0)
        return (
            f"CUDA graphs of prefills: {len(self._graphs)} of up to {most} tokens in {self._took_s:.1f} s, "
            f"{self._held / 2**30:.2f} GiB{left}"
        )

    def capture_one(self) -> bool:
        """A size that has not been tried; False: none is left, or there are to be none."""
        if not self._missing or not self._enabled:
            return False
        decodes, fresh = self._missing.pop(0)
        layout = Layout(decodes, fresh, PREFILLS + 1, min(decodes + PREFILLS, self._steps.capacity))
        start, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        try:
            with torch.inference_mode():
                self._try(layout)
        except RuntimeError as e:  # OutOfMemoryError and CUDA's own are among them
            self._graphs.clear()
            self._missing.clear()
            torch.cuda.empty_cache()
            self._problem = str(e).splitlines()[0]
            log.warning("steps with prefill are eager, CUDA graphs could not be captured: %s", self._problem)
        self._steps.slots.count_step(self._steps.ring.step)  # the device has counted the trial
        self._took_s += time.perf_counter() - start
        self._held += torch.cuda.memory_reserved(self._device) - before
        if self._held > MOST_BYTES:
            self._missing.clear()
        return bool(self._missing)

    def _try(self, layout: Layout) -> None:
        steps = self._steps
        steps.slots.clear_rows()  # rows that pad touch no KV
        host = torch.empty(sum(layout.parts), dtype=torch.int64)
        clear(host, layout)
        words = host.to(self._device)
        step = MixedStep(steps, layout, words)
        step.sample(step.forward(), asked=False)  # compiles and loads what it needs
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        step.sample(step.forward(), asked=False)
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        if time.perf_counter() - start > BUSY * (launched - start):
            self._missing = [one for one in self._missing if sum(one) < layout.tokens]
            return
        forward, sample = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, capture_error_mode="thread_local"):
            due = step.forward()
        with torch.cuda.graph(sample, pool=self._pool, capture_error_mode="thread_local"):
            step.sample(due, asked=False)
        self._graphs.append(MixedGraph(layout, words, step, due, forward, sample))
        self._graphs.sort(key=lambda one: one.layout.tokens)


def sizes(capacity: int, most_tokens: int) -> list[tuple[int, int]]:
    """Rows of decodes and tokens of prompts, in the order in which they are captured."""
    beside = [(rows, fresh) for fresh in BESIDE for rows in DECODES if rows <= capacity]
    wanted = [*((0, fresh) for fresh in FIRST), *beside, *((0, fresh) for fresh in LATER)]
    return [one for one in wanted if one[1] <= most_tokens]
