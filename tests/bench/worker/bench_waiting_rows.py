"""ITL of a GPU worker at 64 rows of Llama-3.1-8B's shape: all rows with a penalty, one row that the host samples, and
plain rows beside prompts with log-probabilities.

`python tests/bench/worker/bench_waiting_rows.py [depth]`: plans queued besides the running one, 1 by default. Each case
runs twice, in turn with its reference.
"""

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from gpu_runner import start_runner
from rig import Row, table
from worker.bench_worker_cpu import driver_class
from worker.bench_worker_gpu import CONFIG

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

ROWS, NUM_IN, NUM_OUT = 64, 256, 160
CLIENT_IN, CLIENT_OUT, NUM_TOP = 1024, 4, 5  # of the client that sends prompts one after another
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


def prompts_beside_ms(runner: Runner, depth: int, num_top: int | None) -> tuple[list[float], int]:
    """Times between tokens of a plain stream while one client sends prompts one after another, and their number.

    num_top: log-probabilities of each of their tokens, None: none.
    """
    it = driver_class()(runner, num_slots=2 * ROWS, depth=depth, chunk=2048)
    generator, vocab = torch.Generator().manual_seed(2), runner.geometry.vocab_size
    prompts = torch.randint(0, vocab, (ROWS - 1, NUM_IN), generator=generator).tolist()
    plain = Sampling(max_tokens=NUM_OUT, ignore_eos=True, temperature=0.0)
    streams = [it.add(prompt, plain) for prompt in prompts]
    asked = Sampling(CLIENT_OUT, 0.0, ignore_eos=True, num_prompt_logprobs=num_top)
    sent, times, known = list[Any](), list[float](), 0
    while streams[0].finish is None:
        if all(s.output for s in streams) and (not sent or sent[-1].finish is not None):
            sent.append(it.add(torch.randint(0, vocab, (CLIENT_IN,), generator=generator).tolist(), asked))
        it.queued.append(it.plan())
        while len(it.queued) + runner.in_flight > depth:
            it.step()
        if len(streams[0].output) > known and sent:
            times.append(time.perf_counter())
        known = len(streams[0].output)
    it.run()
    assert all(len(s.prompt_logprobs) == (0 if num_top is None else CLIENT_IN - 1) for s in sent)
    return [1e3 * (b - a) for a, b in pairwise(times[8:])], len(sent)


def prompt_rows(runner: Runner, depth: int) -> list[Row]:
    """ITL of 63 plain rows beside prompts with log-probabilities, and without."""
    for num_top in (None, NUM_TOP):
        prompts_beside_ms(runner, depth, num_top)  # compiles kernels, and captures graphs of such steps
    (without, num), (scored, _) = (prompts_beside_ms(runner, depth, num_top) for num_top in (None, NUM_TOP))
    ratios = f"p50 {median(scored) / median(without):.3f}, p99 {_p99(scored) / _p99(without):.3f}"
    values = [f"mean {mean(one):.3f}, p50 {median(one):.3f}, p99 {_p99(one):.3f}" for one in (without, scored)]
    what = f"63 plain beside {num} prompts of {CLIENT_IN:,} tokens"
    return [
        (what, values[0], ""),
        (f"{what}, {NUM_TOP} log-probabilities a token", values[1], f"{ratios} of those without; bar 1.03 of p50"),
    ]


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


def main(depth: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        runner = start_runner(Path(folder), 2 * ROWS, 2048, max_num_seqs=ROWS)
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
        rows += prompt_rows(runner, depth)
    print(table(rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2] or ("1",)))
