"""What a decode step of a small model is made of, on a GPU: a line for each kernel of its graphs.

`bench_step_parts.py FOLDER [rows] [--context N]`. FOLDER needs config.json alone. *Alone* is the kernel's own time as
CUPTI saw it, what it waited for kernels before it included; *adds* is what its end is later than the end of the kernel
before, which sums up to the step. Graphs are timed without CUPTI, back to back.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_runner import start_runner
from worker.bench_timeline import Kernel, Loop, kernels_of, run_steps

from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps

GREEDY = {"temperature": 0.0}


def replay_ms(call: Callable[[], object], times: int = 100) -> float:
    """The best of a few."""
    call()
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / times)
    return best


def parts_table(kernels: list[Kernel], steps: int) -> str:
    parts: dict[str, list[tuple[float, float]]] = {}
    ends = list(itertools.accumulate((kernel.end_us for kernel in kernels), max))
    for i, kernel in enumerate(kernels[1:]):
        added = max(kernel.end_us - ends[i], 0.0)
        parts.setdefault(kernel.name[:60], []).append((kernel.end_us - kernel.start_us, added))
    lines = ["| kernel | a step | alone, us | adds, us | adds a step, us |", "|---|---|---|---|---|"]
    for name, times in sorted(parts.items(), key=lambda item: -sum(t[1] for t in item[1])):
        alone, added = (sum(t[i] for t in times) for i in range(2))
        n = len(times)
        lines.append(f"| {name} | {n / steps:.1f} | {alone / n:.2f} | {added / n:.2f} | {added / steps:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int, nargs="?", default=1)
    parser.add_argument("--context", type=int, default=230)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    length = args.context + 4 * args.steps + 64
    runner = start_runner(args.folder, args.rows, length, max_num_seqs=args.rows)
    loop = Loop(runner, args.rows, args.context, GREEDY)
    run_steps(loop, 10, 3)
    took = min(run_steps(loop, args.steps, 3)[0] for _ in range(2))
    kernels = kernels_of(loop, args.steps, 3)
    assert isinstance(runner.loop.steps, CudaSteps)
    steps = runner.loop.steps.decodes
    size = steps.padded(args.rows, length)
    output = steps.forward(size)
    forward = replay_ms(lambda: steps.forward(size))
    sample = replay_ms(lambda: steps.sample(size, output, needs_processing=False))
    print(
        f"{args.folder.name}, {args.rows} rows, context {args.context}: {took:.4f} ms a step run ahead;"
        f" graphs: forward {forward:.4f}, sample {sample:.4f} ms"
    )
    print(parts_table(kernels, args.steps))


if __name__ == "__main__":
    main()
