"""ITL of a GPU worker at 64 rows of Llama-3.1-8B's shape: all rows with a penalty, and one row that the host samples.

`python tests/bench/bench_waiting_rows.py [depth]`: plans queued besides the running one, 1 by default. Each case runs
twice, in turn with its reference.
"""

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch
from bench_worker_cpu import driver_class
from bench_worker_gpu import CONFIG
from gpu_runner import start_runner
from rig import Row, table

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

ROWS, NUM_IN, NUM_OUT = 64, 256, 160
PLAIN = {"temperature": 0.0}
BAD_WORDS = {"temperature": 0.0, "bad_words": [[5, 6], [7, 8, 9]]}
NOISY_BAD_WORDS = BAD_WORDS | {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
CASES = {
    "64 plain": [PLAIN] * ROWS,
    "64 with repetition_penalty": [PLAIN | {"repetition_penalty": 1.05}] * ROWS,
    "63 plain beside one with bad words": [PLAIN] * (ROWS - 1) + [BAD_WORDS],
    "63 plain beside one with bad words, penalty, top_p": [PLAIN] * (ROWS - 1) + [NOISY_BAD_WORDS],
    "48 plain beside 16 with bad words": [PLAIN] * (ROWS - 16) + [BAD_WORDS] * 16,
}


def intervals_ms(runner: Runner, asked: list[dict[str, object]], depth: int) -> tuple[list[float], float]:
    """Times between tokens of the first stream while all streams decode, and tokens of the last stream for each."""
    it = driver_class()(runner, num_slots=2 * ROWS, depth=depth, chunk=2048, seed=None)
    prompts = torch.randint(0, 128000, (len(asked), NUM_IN), generator=torch.Generator().manual_seed(1)).tolist()
    streams = [
        it.add(prompt, Sampling(max_tokens=NUM_OUT, ignore_eos=True, seed=i, **fields))
        for i, (prompt, fields) in enumerate(zip(prompts, asked, strict=True))
    ]
    first, last, times, known = streams[0], streams[-1], list[float](), 0
    while first.finish is None:
        it.queued.append(it.plan())
        while len(it.queued) + runner.in_flight > depth:
            it.step()
        if len(first.output) > known and all(s.output for s in streams):
            times.append(time.perf_counter())
        known = len(first.output)
    share = len(last.output) / len(first.output)
    it.run()
    assert not any(s.detail for s in streams)
    return [1e3 * (b - a) for a, b in pairwise(times[8:])], share


def main(depth: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        runner = start_runner(Path(folder), 2 * ROWS, 1024, max_num_seqs=ROWS)
    rows: list[Row] = []
    for _ in range(2):
        base = 0.0
        for name, asked in CASES.items():
            times, share = intervals_ms(runner, asked, depth)
            base = base or mean(times)
            values = f"mean {mean(times):.3f}, p50 {median(times):.3f}, p99 {sorted(times)[-2]:.3f}"
            rows.append(
                (name, f"{values}; {mean(times) / base:.3f} of plain", f"last stream {share:.2f} tokens a step")
            )
    print(table(rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2] or ("1",)))
