"""Steps with prefills beside decodes on a GPU: launched kernel by kernel and as CUDA graphs, and what capturing takes.

`bench_mixed_steps.py FOLDER [--decodes N ...] [--fresh N ...] [--prompts N ...]`. FOLDER needs config.json alone:
weights are random, products are cuBLAS'. Decodes have a context of 512. *Alone*: from a launch to its results, the
device idle before, medians; *ahead*: of steps in a row, two more plans in flight.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from gpu_runner import start_runner

from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import BatchDescriptor
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, SlotRun, SlotStart, StepPlan

GREEDY = Sampling(4096, temperature=0.0, ignore_eos=True)
CONTEXT, LENGTH = 512, 4096  # tokens before a decode; that a sequence may have
IN_FLIGHT = 3
ALONE, AHEAD = 5, 12  # steps


class Load:
    """Plans of `decodes` running choices and, in each, other prompts of together `fresh` tokens."""

    def __init__(self, runner: Runner, decodes: int, fresh: int, prompts: int) -> None:
        self.runner, self.num_decodes, self.num_prefill_tokens, self.prompts = runner, decodes, fresh, prompts
        self._number, self._rng = 0, np.random.default_rng(0)
        self._ends: list[int] = []
        self.host_s: list[float] = []  # of each launch
        runner.reset(2 * runner.geometry.max_num_seqs)
        starts = [self._start(i, CONTEXT + 1, CONTEXT) for i in range(decodes)]
        if decodes:
            self._launch(starts, [])
            self._wait(0)

    def alone(self) -> float:
        """Median seconds of a step."""
        times = []
        for _ in range(1 + ALONE):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._step()
            self._wait(0)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def ahead(self) -> float:
        """Seconds a step."""
        for i in range(2 + AHEAD):
            if i == 2:
                self._wait(0)
                self.host_s.clear()
                began = time.perf_counter()
            self._step()
            self._wait(IN_FLIGHT - 1)
        self._wait(0)
        return (time.perf_counter() - began) / AHEAD

    def _step(self) -> None:
        capacity = self.runner.geometry.max_num_seqs
        lengths = np.full(self.prompts, self.num_prefill_tokens // self.prompts)
        lengths[: self.num_prefill_tokens % self.prompts] += 1
        slots = range(capacity + self._number % 2 * self.prompts, 2 * capacity)
        starts = [self._start(slot, int(n), 0) for slot, n in zip(slots, lengths, strict=False)]
        runs = [SlotRun(slot, int(n)) for slot, n in zip(slots, lengths, strict=False)]
        self._launch(starts, runs)
        self._ends = [start.slot for start in starts]

    def _launch(self, starts: list[SlotStart], runs: list[SlotRun]) -> None:
        self._number += 1
        decodes = [SlotRun(slot, 1) for slot in range(self.num_decodes)]
        began = time.perf_counter()
        self.runner.launch(StepPlan(1, self._number, self._ends, starts, [], [*decodes, *runs]))
        self.host_s.append(time.perf_counter() - began)

    def _start(self, slot: int, length: int, computed: int) -> SlotStart:
        size = self.runner.geometry.block_size
        ids = self._rng.integers(10, 4000, length).astype("<u4")
        many = -(-LENGTH // 4 // size) if computed else -(-(length + 1) // size)
        first = slot * (LENGTH // 4 // size)
        return SlotStart(slot, ids.tobytes(), length, computed, list(range(first, first + many)), GREEDY, 0)

    def _wait(self, most: int) -> None:
        while self.runner.in_flight > most:
            for done in self.runner.collect():
                assert not any(one.detail for one in done.all_results), done.all_results


def measure(runner: Runner, cases: list[tuple[int, int, int]]) -> list[tuple[float, float, float]]:
    """Times of each in ms: alone, ahead, and the launch of one ahead."""
    found = []
    for case in cases:
        load = Load(runner, *case)
        alone, ahead = load.alone(), load.ahead()
        found.append((1e3 * alone, 1e3 * ahead, 1e3 * statistics.median(load.host_s)))
        print(case, "alone {:.2f}, ahead {:.2f}, launch {:.2f} ms".format(*found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decodes", type=int, nargs="*", default=[0, 64, 224])
    parser.add_argument("--fresh", type=int, nargs="*", default=[128, 512, 1024, 1792, 2048])
    parser.add_argument("--prompts", type=int, nargs="*", default=[4, 20])
    args = parser.parse_args()
    runner = start_runner(args.folder, 128, LENGTH, enforce_eager=True, max_num_seqs=256)
    steps = runner.loop.steps
    assert isinstance(steps, CudaSteps)
    cases = [
        case
        for case in itertools.product(args.num_decodes, args.num_prefill_tokens, args.prompts)
        if case[0] + case[1] <= runner.geometry.max_num_batched_tokens
    ]
    print("kernel by kernel", flush=True)
    eager = measure(runner, cases)
    runner.reset(0)
    began = time.perf_counter()
    steps.capture()
    print(f"captured for {time.perf_counter() - began:.2f} s; {'; '.join(steps.describe())}", flush=True)
    while steps.idle():
        pass
    print(f"all after {time.perf_counter() - began:.2f} s; {'; '.join(steps.describe())}", flush=True)
    sizes = steps.graphs._sizes
    for descriptor, seconds in sizes._device_s.items():
        print(f"  {descriptor}: device {1e3 * seconds:.2f} ms")
    print(f"  launch {1e3 * statistics.fmean(sizes._launches_s):.2f} ms", flush=True)
    graphs = measure(runner, cases)
    print("(decodes, fresh, prompts) | eager: alone, ahead, launch | graphs: alone, ahead, launch | size")
    for case, before, after in zip(cases, eager, graphs, strict=True):
        step = BatchDescriptor(*case, steps.decodes.padded_num_seqs(case[0] + case[2]))
        times = " | ".join(", ".join(f"{ms:.2f}" for ms in one) for one in (before, after))
        print(f"{case} | {times} | {sizes.pick(step)}")


if __name__ == "__main__":
    main()
