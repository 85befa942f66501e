"""The demo model through the whole ring against fp32 `transformers` generate, interleaved in one run on the CPU.

`bench_demo.py [float32|bfloat16 [LEVEL]]`: what the ring computes in, and its `-O`.
"""

import sys
import time
import warnings
from dataclasses import dataclass, field

import torch
from raw_client import raw_streams
from rig import ROOT, Row, completion, median, serve, table
from transformers import AutoModelForCausalLM
from worker.bench_worker_cpu import Bare, kinds

MODEL = ROOT / "shared" / "demo_model"
NUM_IN, NUM_OUT = 64, 128
ROUNDS = 5


def prompts(num: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 4000, (num, NUM_IN), generator=generator).tolist()


class Transformers:
    """`generate` in fp32 at a given number of threads, greedy, exactly NUM_OUT tokens."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def tokens_per_s(self, num: int, threads: int) -> float:
        torch.set_num_threads(threads)
        ids = torch.tensor(prompts(num))
        start = time.perf_counter()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_OUT,
                min_new_tokens=NUM_OUT,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        assert out.shape[1] == NUM_IN + NUM_OUT
        return num * NUM_OUT / seconds


def ring_tokens_per_s(url: str, num: int) -> float:
    bodies = [completion(NUM_OUT, prompt=ids) for ids in prompts(num)]
    start = time.perf_counter()
    logs = raw_streams(url, bodies)
    seconds = time.perf_counter() - start
    assert all(log.events()[-1][1].choices[0].finish_reason == "length" for log in logs)
    return num * NUM_OUT / seconds


def bare_tokens_per_s(loops: list[Bare], num: int) -> float:
    """The best of the bare loops over the same layers, one compute thread as the worker has."""
    torch.set_num_threads(1)
    ids = torch.tensor(prompts(num))
    seconds = []
    with torch.inference_mode():
        for loop in loops:
            start = time.perf_counter()
            loop.generate(ids)
            seconds.append(time.perf_counter() - start)
    return num * NUM_OUT / min(seconds)


@dataclass
class Rates:
    """Tokens/s of each round; compared values were measured in the same round."""

    ring: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def against(self, others: list[float]) -> float:
        return median([ours / theirs for ours, theirs in zip(self.ring, others, strict=True)])


def measure(num: int, peer: Transformers, loops: list[Bare], url: str) -> Rates:
    rates = Rates()
    for _ in range(ROUNDS):
        rates.peer.append(max(peer.tokens_per_s(num, threads) for threads in (1, 2)))
        rates.bare.append(bare_tokens_per_s(loops, num))
        rates.ring.append(ring_tokens_per_s(url, num))
    return rates


# by dtype: (streams, bar against transformers, bar against the bare loop)
BARS = {
    "float32": ((1, "1.5 (aim 1.8)", "60 %"), (16, "1.2 (aim 1.5)", "60 %")),
    "bfloat16": ((1, "2.5 (aim 3.2)", "75 %"), (16, "1.8 (aim 2.3)", "75 %")),
}


def bare_loops(dtype: str) -> list[Bare]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype))
    return [Bare(model, kind) for kind in kinds(dtype)]


def demo_rows(dtype: str = "float32", level: str = "2") -> list[Row]:
    rows: list[Row] = []
    peer = Transformers()
    loops = bare_loops(dtype)
    flags = ("--dtype", dtype, "-O", level, "--no-enable-prefix-caching")  # the rounds repeat their prompts
    with serve("demo", *flags) as server:
        for num, bar, bare_bar in BARS[dtype]:
            measure(num, peer, loops, server.url)  # warm-up
            rates = measure(num, peer, loops, server.url)
            what = f"demo model through the ring, {dtype}, -O{level}, {num} stream{'s' if num > 1 else ''}"
            tokens = f"{median(rates.ring):,.0f} to {median(rates.peer):,.0f} tokens/s"
            text = f"{rates.against(rates.peer):.2f} times ({tokens})"
            rows.append((f"{what}, against fp32 `transformers` generate", text, bar))
            text = f"{100 * rates.against(rates.bare):.0f} % of {median(rates.bare):,.0f} tokens/s"
            rows.append((f"{what}, against the best bare loop", text, bare_bar))
    return rows


if __name__ == "__main__":
    print(table(demo_rows(*sys.argv[1:])))
