"""The demo model through the whole ring against `transformers` generate, interleaved in one run on the CPU."""

import time
import warnings
from pathlib import Path

import torch
from raw_client import raw_streams
from rig import ROOT, Row, completion, median, serve, table
from transformers import AutoModelForCausalLM

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


def compare(num: int, peer: Transformers, url: str) -> tuple[float, float, float]:
    """Medians: ring, transformers at its best thread count, and the median of the ratios of neighbouring runs."""
    ring, theirs, ratios = [], [], []
    for _ in range(ROUNDS):
        best = max(peer.tokens_per_s(num, threads) for threads in (1, 2))
        ours = ring_tokens_per_s(url, num)
        ring.append(ours)
        theirs.append(best)
        ratios.append(ours / best)
    return median(ring), median(theirs), median(ratios)


def main() -> list[Row]:
    rows: list[Row] = []
    peer = Transformers()
    log = Path("/tmp/blockyard-bench-demo.log")
    with serve("demo", "--dtype", "float32", log=log) as server:
        for num in (1, 16):  # warm both
            peer.tokens_per_s(num, 1)
            ring_tokens_per_s(server.url, num)
        for num, bar in ((1, "1.5 (aim 1.8)"), (16, "1.2 (aim 1.5)")):
            ours, theirs, ratio = compare(num, peer, server.url)
            text = f"{ratio:.2f} times ({ours:,.0f} against {theirs:,.0f} tokens/s)"
            rows.append((f"demo model, {num} stream(s), against `transformers` generate", text, bar))
    return rows


if __name__ == "__main__":
    print(table(main()))
