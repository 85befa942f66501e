"""Decode steps and prefills of a model shape with random weights on a GPU: time of each, and a line for each kernel.

`bench_model_steps.py SHAPE [--decode ROWS:CONTEXT ...] [--prefill TOKENS ...]`, for example `qwen3-30b-a3b --decode
1:200 64:1024 --prefill 2048 8192`. SHAPE is one of `blockyard bench suite`. The worker first does its idle work: it
measures kernels and captures graphs. Kernels are as CUPTI saw them, see bench_step_parts.py.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from gpu_runner import start_runner
from worker.bench_step_parts import parts_table
from worker.bench_timeline import Loop, kernels_during, kernels_of, run_steps

from blockyard.services.bench.suite import shapes
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, SlotBlocks, SlotRun, SlotStart

GREEDY = {"temperature": 0.0}
MARGIN = 320  # tokens that a decode case writes, at most
IDLE_S = 120.0
RUNS = 5


class Prefills(Loop):
    """Prompts one after another, in steps as large as the worker allows, launched ahead."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._number, self.num_tokens = runner, 0, 0

    def run(self, num_tokens: int) -> float:
        """Milliseconds from the first plan to the first token."""
        runner, geometry = self._runner, self._runner.geometry
        runner.reset(1)
        self._number = 0
        ids = np.random.default_rng(num_tokens).integers(10, 4000, num_tokens).astype("<u4")
        sampling = Sampling(num_tokens + 8, seed=1, ignore_eos=True, temperature=0.0)
        blocks = list(range(-(-(num_tokens + 1) // geometry.block_size)))
        begin = time.perf_counter()
        for done in range(0, num_tokens, geometry.max_num_batched_tokens):
            starts = [] if done else [SlotStart(0, ids.tobytes(), num_tokens, 0, [], sampling, 0)]
            while not runner.can_launch():
                self.collect(runner.in_flight - 1)
            count = min(geometry.max_num_batched_tokens, num_tokens - done)
            self._send(starts, [] if done else [SlotBlocks(0, blocks)], [SlotRun(0, count)])
        self.collect(0)
        return 1e3 * (time.perf_counter() - begin)


def decode_case(text: str) -> tuple[int, int]:
    rows, context = map(int, text.split(":"))
    return rows, context


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=shapes.SHAPES)
    parser.add_argument("--decode", type=decode_case, nargs="*", default=[(1, 200)])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens of a step (%(default)s)")
    parser.add_argument("--kernels", type=int, default=24, help="lines of a table, at most")
    args = parser.parse_args()
    longest = max([context for _, context in args.decode] + args.prefill) + MARGIN
    tokens = max([rows * (context + MARGIN) for rows, context in args.decode] + [longest])
    most_rows = max([rows for rows, _ in args.decode] + [1])
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.write(args.shape, Path(folder))
        steps = {"max_num_seqs": most_rows, "max_num_batched_tokens": args.max_num_batched_tokens}
        runner = start_runner(model, -(-tokens // longest) + 1, longest, **steps)
    begin = time.perf_counter()
    while runner.idle() and time.perf_counter() - begin < IDLE_S:
        pass
    print(f"idle work {time.perf_counter() - begin:.1f} s", flush=True)
    for rows, context in args.decode:
        loop = Loop(runner, rows, context, GREEDY)
        run_steps(loop, 8, 3)
        took = min(run_steps(loop, 24, 3)[0] for _ in range(3))
        print(f"\n{args.shape}, {rows} rows, context {context}: {took:.3f} ms a step", flush=True)
        print("\n".join(parts_table(kernels_of(loop, 12, 3), 12).splitlines()[: args.kernels + 2]), flush=True)
    prefills = Prefills(runner)
    for num_tokens in args.prefill:
        for _ in range(2):
            prefills.run(num_tokens)
        took = statistics.median(prefills.run(num_tokens) for _ in range(RUNS))
        print(f"\n{args.shape}, a prompt of {num_tokens:,}: {took:.2f} ms", flush=True)
        table = parts_table(kernels_during(partial(prefills.run, num_tokens)), 1)
        print("\n".join(table.splitlines()[: args.kernels + 2]), flush=True)


if __name__ == "__main__":
    main()
