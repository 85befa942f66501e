"""Decode steps of one worker on a GPU, run ahead: time a step, the gaps between steps, and a picture of them.

`bench_timeline.py FOLDER [batch ...] [--depth N] [--context N] [--steps N] [--svg FILE]`. FOLDER needs config.json
alone: weights are random. Gaps are from the end of a step's last kernel to the start of the next step's first, as
CUPTI saw them; the picture is of the last batch.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_runner import start_runner
from torch.profiler import ProfilerActivity, profile

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, SlotBlocks, SlotRun, SlotStart, StepPlan

LAST_KERNEL = "_advance_slots_kernel"
SHOWN_STEPS = 3


@dataclass(frozen=True)
class Kernel:
    name: str
    start_us: float
    end_us: float


class Loop:
    """Plans as a scheduler makes them: all slots run in each, blocks arrive one by one."""

    def __init__(self, runner: Runner, batch: int, context: int, sampling: dict[str, Any]) -> None:
        self._runner, self._batch = runner, batch
        runner.reset(batch)
        size, most = runner.geometry.block_size, runner.geometry.max_model_len
        self._blocks = iter(np.random.default_rng(0).permutation(runner.geometry.num_blocks).tolist())
        self._number = self.num_tokens = 0
        self._length, self._capacity = context, 0
        ids = np.random.default_rng(1).integers(10, 4000, (batch, context)).astype("<u4")
        starts = [
            SlotStart(i, ids[i].tobytes(), context, 0, [], Sampling(most, seed=i, ignore_eos=True, **sampling), 0)
            for i in range(batch)
        ]
        need = -(-context // size)
        blocks = [SlotBlocks(i, [next(self._blocks) for _ in range(need)]) for i in range(batch)]
        self._capacity = need * size
        for i in range(batch):  # prompts one by one: the steps that matter come later
            self._send([starts[i]], [blocks[i]], [SlotRun(i, context)])
            self.collect(0)

    def step(self) -> None:
        self._length += 1
        blocks = []
        if self._length > self._capacity:
            self._capacity += self._runner.geometry.block_size
            blocks = [SlotBlocks(i, [next(self._blocks)]) for i in range(self._batch)]
        self._send([], blocks, [SlotRun(i, 1) for i in range(self._batch)])

    def collect(self, depth: int) -> None:
        """Until no more than `depth` plans are in flight."""
        while self._runner.in_flight > depth:
            for done in self._runner.collect():
                self.num_tokens += sum(len(r.token_ids) for r in done.all_results)
                assert not any(r.detail for r in done.all_results), done.all_results[0].detail

    def _send(self, starts: list[SlotStart], blocks: list[SlotBlocks], runs: list[SlotRun]) -> None:
        self._number += 1
        self._runner.launch(StepPlan(1, self._number, [], starts, blocks, runs))


def run_steps(loop: Loop, steps: int, depth: int) -> tuple[float, float]:
    """Milliseconds a step, and of them the host's own work."""
    loop.collect(0)
    torch.cuda.synchronize()
    before, host = loop.num_tokens, 0.0
    start = time.perf_counter()
    for _ in range(steps):
        begin = time.perf_counter()
        loop.step()
        host += time.perf_counter() - begin
        loop.collect(depth)
    loop.collect(0)
    took = time.perf_counter() - start
    assert loop.num_tokens - before == steps * loop._batch, "realised tokens"
    return 1e3 * took / steps, 1e3 * host / steps


def kernels_of(loop: Loop, steps: int, depth: int) -> list[Kernel]:
    return kernels_during(lambda: run_steps(loop, steps, depth))


def kernels_during(work: Callable[[], object]) -> list[Kernel]:
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        work()
    found = [
        Kernel(e.name, e.time_range.start, e.time_range.end)
        for e in traced.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start
    ]
    return sorted(found, key=lambda kernel: kernel.start_us)


def gaps_of(kernels: list[Kernel]) -> list[float]:
    """Microseconds in which nothing ran between two steps."""
    gaps = []
    for i, kernel in enumerate(kernels[:-1]):
        if kernel.name.startswith(LAST_KERNEL):
            gaps.append(max(0.0, kernels[i + 1].start_us - kernel.end_us))
    return gaps


def table_of(kernels: list[Kernel], steps: int, most: int) -> str:
    totals: dict[str, list[float]] = {}
    for kernel in kernels:
        totals.setdefault(kernel.name[:70], []).append(kernel.end_us - kernel.start_us)
    rows = sorted(totals.items(), key=lambda item: -sum(item[1]))[:most]
    lines = [f"  {sum(t) / steps:9.1f} us a step, {len(t) / steps:6.1f} x {sum(t) / len(t):7.2f}  {n}" for n, t in rows]
    return "\n".join(lines)


def draw(kernels: list[Kernel], title: str) -> str:
    """An SVG of a few steps: kernels by kind on their own lines."""
    ends = [i for i, kernel in enumerate(kernels) if kernel.name.startswith(LAST_KERNEL)]
    middle = len(ends) // 2
    shown = kernels[ends[middle - 1] : ends[middle - 1 + SHOWN_STEPS] + 2]
    origin, span = shown[0].start_us, shown[-1].end_us - shown[0].start_us
    names = list(dict.fromkeys(kernel.name.split("(")[0][:44] for kernel in shown))
    width, left, line = 1500, 320, 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{60 + line * len(names)}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="8" y="18" font-size="14">{title}</text>'
    ]
    for i, name in enumerate(names):
        parts.append(f'<text x="8" y="{46 + line * i}">{name.replace("<", "&lt;")}</text>')
    for kernel in shown:
        row = names.index(kernel.name.split("(")[0][:44])
        x = left + (kernel.start_us - origin) / span * width
        wide = max((kernel.end_us - kernel.start_us) / span * width, 0.4)
        colour = "#c0392b" if kernel.name.startswith(LAST_KERNEL) else "#2471a3"
        parts.append(f'<rect x="{x:.1f}" y="{36 + line * row}" width="{wide:.2f}" height="12" fill="{colour}"/>')
    return "\n".join([*parts, f'<text x="{left}" y="{54 + line * len(names)}">{span:.0f} us</text></svg>'])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("batch", type=int, nargs="*", default=[64])
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kernels", type=int, default=16)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    most = max(args.batch)
    runner = start_runner(args.folder, most, args.context + 6 * args.steps + 64, max_num_seqs=most)
    for batch in args.batch:
        for name, sampling in (("top-p 0.9", {"temperature": 0.8, "top_p": 0.9}), ("greedy", {"temperature": 0.0})):
            loop = Loop(runner, batch, args.context, sampling)
            run_steps(loop, 10, args.depth)
            for depth in (0, args.depth):
                step, host = run_steps(loop, args.steps, depth)
                what = f"{batch:4} rows, context {args.context}, {name}, depth {depth}"
                print(f"{what}: {step:.3f} ms a step, host {host:.3f}")
        kernels = kernels_of(loop, args.steps, args.depth)
        gaps = np.array(gaps_of(kernels))
        busy = sum(k.end_us - k.start_us for k in kernels) / args.steps
        quantiles = ", ".join(f"p{q} {np.percentile(gaps, q):.1f}" for q in (1, 50, 90, 99, 100))
        print(f"{batch:4} rows: {len(gaps)} gaps between steps in us: {quantiles}; kernels alone {busy:.0f} us a step")
        print(table_of(kernels, args.steps, args.kernels))
    if args.svg is not None:
        title = f"{SHOWN_STEPS} decode steps of {args.folder.name}, {args.batch[-1]} rows, {args.depth} ahead"
        args.svg.write_text(draw(kernels, title))


if __name__ == "__main__":
    main()
