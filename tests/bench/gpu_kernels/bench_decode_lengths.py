"""Decode attention of sequences of other lengths: microseconds a layer, the schedule of a step included.

    python tests/bench/gpu_kernels/bench_decode_lengths.py [--kv-heads 4]

32 heads on 8 or another number, head size 128, bfloat16, blocks of 16 in random order. A schedule and 30 layers, of
three in turn, are one CUDA graph; the best of five times ten replays. The floor is the bytes of K and V at 4.19 TB/s.
"""

import argparse
import random

import torch

from blockyard.kernels.attention.paged_decode import paged_decode, schedule_decode
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

HEADS, DIM, BLOCK = 32, 128, 16
RULES = ScoreRules(scale=DIM**-0.5)
LAYERS, IN_TURN, REPLAYS = 30, 3, 10
LONGEST = 16384
RANDOM = random.Random(0)
MIXED = [100 + 61 * i % 1900 for i in range(256)]
LOADS = {
    "64 x 1,024": [1024] * 64,
    "60 x 1,024": [1024] * 60,
    "48 x 1,024": [1024] * 48,
    "32 x 1,024": [1024] * 32,
    "70 x 1,024": [1024] * 70,
    "64 x 1,500": [1500] * 64,
    "64 x 1,500 + 8,192": [1500] * 64 + [8192],
    "64 x 1,024 + 8,192": [1024] * 64 + [8192],
    "16 x 1,024": [1024] * 16,
    "8 x 4,096": [4096] * 8,
    "32 x 100 to 2,000": MIXED[:32],
    "64 x 100 to 2,000": MIXED[:64],
    "128 x 1,024": [1024] * 128,
    "256 x 1,024": [1024] * 256,
    "256 x 100 to 2,000": MIXED,
    "100 x 1,100": [1100] * 100,
    "48 x 4,096": [4096] * 48,
    "32 x 8,192 + 100": [8192] * 32 + [100],
    "200 random": [RANDOM.randrange(50, 3000) for _ in range(200)],
}


def layer_us(lengths: list[int], kv_heads: int) -> float:
    rows, num_blocks = len(lengths), sum(-(-length // BLOCK) for length in lengths)
    blocks = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)
    tables = torch.zeros(rows, -(-max(lengths) // BLOCK), dtype=torch.int32, device="cuda")
    begin = 0
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK)
        tables[row, :count] = blocks[begin : begin + count]
        begin += count
    layers = [
        torch.randn(num_blocks, 2, kv_heads, BLOCK, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(IN_TURN)
    ]
    positions = torch.tensor(lengths, device="cuda") - 1
    seqs = PagedKVMetadata(torch.arange(rows, device="cuda"), positions, tables)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, HEADS * DIM, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        schedule = schedule_decode(q, layers[0], seqs, RULES, LONGEST)
        for i in range(LAYERS):
            paged_decode(q, layers[i % IN_TURN], seqs, RULES, LONGEST, out, schedule)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    best = float("inf")
    for _ in range(5):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        for _ in range(REPLAYS):
            graph.replay()
        end_event.record()
        end_event.synchronize()
        best = min(best, begin_event.elapsed_time(end_event))
    return 1e3 * best / (REPLAYS * LAYERS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-heads", type=int, default=8)
    kv_heads = parser.parse_args().kv_heads
    for name, lengths in LOADS.items():
        taken, floor = layer_us(lengths, kv_heads), sum(lengths) * kv_heads * DIM * 2 * 2 / 4.19e6
        print(f"{name:20} {taken:8.2f} us a layer, floor {floor:7.2f}, {floor / taken:4.0%}", flush=True)


if __name__ == "__main__":
    main()
