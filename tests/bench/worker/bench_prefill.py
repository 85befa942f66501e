"""Prompts through one worker on a GPU: time to the first token, where it goes by kind of kernel, and the gaps.

`bench_prefill.py FOLDER [--prompts N ...] [--cached N] [--chunks N ...] [--eager]`. FOLDER needs config.json alone:
weights are random. Plans are as a scheduler sends them, two in flight; time is from the first plan's launch to the
token on the host, medians. A prompt "cached + N" finds so many tokens computed.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from gpu_runner import start_runner
from torch.profiler import ProfilerActivity, profile

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, SlotRun, SlotStart, StepPlan

GREEDY = Sampling(8, temperature=0.0, ignore_eos=True)
IN_FLIGHT = 2
KINDS = (
    ("prefill", "attention"),
    ("combine", "attention"),
    ("attention", "attention"),
    ("decode", "attention"),
    ("silu", "gate"),
    ("norm", "norms"),
    ("rope", "rope, KV write"),
    ("gemm", "products"),
    ("gemv", "products"),
    ("nvjet", "products"),
    ("cutlass", "products"),
    ("splitk", "products"),
    ("_few_rows", "products"),
    ("_tiles", "products"),
)


class Prompt:
    """One prompt in a slot of its own, in chunks."""

    def __init__(self, runner: Runner, length: int, cached: int, chunk: int, seed: int) -> None:
        self.runner, self.length, self.chunk = runner, length, chunk
        size = runner.geometry.block_size
        ids = np.random.default_rng(seed).integers(10, 4000, length).astype("<u4")
        order = np.random.default_rng(0).permutation(runner.geometry.num_blocks)
        blocks = order[: -(-(length + 1) // size)].tolist()
        self._start = SlotStart(0, ids.tobytes(), length, cached, blocks, GREEDY, 0)
        self._left = length - cached
        self.host_s: list[float] = []  # of each launch
        self.token = -1  # the first one

    def run(self) -> float:
        """Seconds to its first token."""
        runner, number = self.runner, 0
        runner.reset(2)
        torch.cuda.synchronize()
        began = time.perf_counter()
        while True:
            while self._left and runner.in_flight < IN_FLIGHT:
                number += 1
                some = min(self._left, self.chunk)
                self._left -= some
                starts = [self._start] if number == 1 else []
                before = time.perf_counter()
                runner.launch(StepPlan(1, number, [], starts, [], [SlotRun(0, some)]))
                self.host_s.append(time.perf_counter() - before)
            for done in runner.collect():
                assert not done.all_results[0].detail, done.all_results[0].detail
                if done.all_results[0].token_ids:
                    self.token = done.all_results[0].token_ids[0]
                    return time.perf_counter() - began


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for part, kind in KINDS if part in lower), "other")


def describe(prompt: Prompt) -> list[str]:
    """What ran on the device for one prompt."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        prompt.run()
        torch.cuda.synchronize()
    found = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in traced.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start
    )
    kinds: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    gaps, end = [], found[0][0]
    for begin, stop, name in found:
        gaps.append(max(0.0, begin - end))
        end = max(end, stop)
        kinds.setdefault(kind_of(name), []).append(stop - begin)
        names.setdefault(name, []).append(stop - begin)
    total = sum(sum(times) for times in kinds.values())
    parts = ", ".join(f"{k} {sum(t) / 1e3:.2f}" for k, t in sorted(kinds.items(), key=lambda i: -sum(i[1])))
    large = [gap for gap in gaps if gap > 20]
    lines = [
        f"    device ms: {(end - found[0][0]) / 1e3:.2f} from first to last, kernels {total / 1e3:.2f} ({parts}); "
        f"gaps {sum(gaps) / 1e3:.2f}, {len(large)} over 20 us: {sum(large) / 1e3:.2f}"
    ]
    for name, times in sorted(names.items(), key=lambda item: -sum(item[1]))[:12]:
        lines.append(f"      {sum(times) / 1e3:9.3f} ms, {len(times):5} x {np.mean(times):8.2f} us  {name[:90]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192, 32000])
    parser.add_argument("--cached", type=int, default=16384)
    parser.add_argument("--new", type=int, nargs="*", default=[128])
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="the largest kernels by name")
    args = parser.parse_args()
    longest = max([*args.prompts, args.cached + max([0, *args.new])]) + 64
    runner = start_runner(args.folder, 2, longest, enforce_eager=args.eager)
    cases = [(length, 0) for length in args.prompts]
    if args.new:
        Prompt(runner, args.cached + 1, 0, 2048, 1).run()
        cases += [(args.cached + new, args.cached) for new in args.new]
    for chunk in args.chunks:
        for length, cached in cases:
            if chunk != args.chunks[0] and length - cached <= args.chunks[0]:
                continue
            runs = args.runs if length < 20000 else 2
            Prompt(runner, length, cached, chunk, 1).run()
            prompts = [Prompt(runner, length, cached, chunk, 2 + i) for i in range(runs)]
            times = [1e3 * prompt.run() for prompt in prompts]
            host = [1e3 * s for prompt in prompts for s in prompt.host_s]
            what = f"{length:6} tokens" if not cached else f"{cached} + {length - cached}"
            print(
                f"{what} by {chunk}: {statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f}), "
                f"a launch {statistics.median(host):.2f} ms",
                flush=True,
            )
            lines = describe(Prompt(runner, length, cached, chunk, 1))
            print("\n".join(lines if args.kernels else lines[:1]), flush=True)


if __name__ == "__main__":
    main()
