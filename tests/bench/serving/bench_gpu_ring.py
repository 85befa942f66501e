"""Tokens/s through the whole ring, greedy, 128 in and 256 out, for model folders.

`bench_gpu_ring.py demo FOLDER ...`; a folder needs config.json alone: weights are random, the tokenizer is the demo's.
"""

import sys
import time

from raw_client import raw_streams
from rig import ROOT, completion, serve

NUM_IN, NUM_OUT = 128, 256
DUMMY = ("--tokenizer", str(ROOT / "shared/demo_model"), "--load-format", "dummy", "--max-model-len", "8192")


def body(index: int, num_tokens: int) -> dict[str, object]:
    return completion(num_tokens, prompt=[(7 * index + j) % 4000 + 10 for j in range(NUM_IN)])


def measure(model: str) -> None:
    with serve(model, *(() if model == "demo" else DUMMY)) as server:
        print(f"{model}: ready after {server.ready_s:.1f} s")
        raw_streams(server.url, [body(0, 8)])
        for num in (1, 32):
            start = time.perf_counter()
            raw_streams(server.url, [body(i, NUM_OUT) for i in range(num)])
            seconds = time.perf_counter() - start
            rate, step_ms = num * NUM_OUT / seconds, 1e3 * seconds / NUM_OUT
            print(f"{model}: {num} streams: {rate:,.0f} tokens/s, {step_ms:.2f} ms a step over all")


if __name__ == "__main__":
    for name in sys.argv[1:] or ["demo"]:
        measure(name)
