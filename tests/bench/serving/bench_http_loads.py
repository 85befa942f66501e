"""Four loads over HTTP on a server that runs, ours or a peer's: a fresh start, chats, long prompts, many streams.

    python tests/bench/serving/bench_http_loads.py --url URL [--loads fresh chats long many]
    python tests/bench/serving/bench_http_loads.py --shape NAME [--loads ...] [FLAG ...]

URL is of a server that takes token ids and `return_token_ids`. With `--shape`, one of `bench suite`'s, a server with
random weights starts first, with an empty cache of kernels, so that *fresh* meets what a first start has not done yet.
Prompts are random ids of fixed seeds: two servers get the same requests.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

import msgspec
import uvloop
from rig import Row, percentile, serve, table

from blockyard.services.bench.load import client, http_response
from blockyard.services.bench.load.client import Endpoint
from blockyard.services.bench.load.results import DONE
from blockyard.services.bench.server import find
from blockyard.services.bench.suite import shapes

VOCAB = range(100, 4000)


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Stream:
    """One stream: when each event with tokens came, and the ids."""

    sent_s: float
    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times_s)]

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.token_ids) - 1)


class Client:
    """Sends streams to one server."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._target, self._model = Endpoint(parts.hostname or "", parts.port or 80), model

    async def stream(self, prompt: Sequence[int], num_output: int) -> Stream:
        """Raises RuntimeError unless exactly `num_output` tokens come."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_output,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
        }
        loop = asyncio.get_running_loop()
        exchange = client.Exchange(self._target.request(body), 0.0, time.perf_counter)
        exchange.mark_sent()
        await loop.create_connection(lambda: exchange, self._target.host, self._target.port)
        await exchange.ended
        found = http_response.read(exchange.pieces)
        if exchange.failure or found.status != 200:
            raise RuntimeError(f"HTTP {found.status}: {exchange.failure or found.body[:300]!r}")
        done = Stream(exchange.sent_s)
        for at, data in found.events():
            ids = [i for one in decode_chunk(data).choices for i in one.token_ids or []] if data != DONE else []
            if ids:
                done.times_s.append(at)
                done.token_ids += ids
        if len(done.token_ids) != num_output:
            raise RuntimeError(f"{len(done.token_ids)} tokens, not {num_output}")
        return done


def prompt(rng: random.Random, num: int) -> list[int]:
    return rng.choices(VOCAB, k=num)


async def fresh(server: Client) -> list[Row]:
    """24 streams at a time, 240 in all, of 900 tokens in and 200 out."""
    rng, free = random.Random(1), asyncio.Semaphore(24)

    async def one(ids: list[int]) -> Stream:
        async with free:
            return await server.stream(ids, 200)

    began_s = time.perf_counter()
    done = await asyncio.gather(*(one(prompt(rng, 900)) for _ in range(240)))
    took_s = time.perf_counter() - began_s
    gaps = sorted((gap for one in done for gap in one.gaps_s), reverse=True)
    ttfts = [one.ttft_s for one in done]
    return [
        ("24 streams, 900 / 200, at once after the start: tokens/s", f"{240 * 200 / took_s:,.0f}", ""),
        (
            "longest gap; second; p99.9; TTFT p99",
            _ms([gaps[0], gaps[24], percentile(gaps, 0.999), percentile(ttfts, 0.99)]),
            "",
        ),
    ]


async def chats(server: Client) -> list[Row]:
    """60 chats of 5 turns, 4 new ones a second: 1,200 tokens first, 80 more a turn, answers of 200."""
    rng = random.Random(2)

    async def chat(delay_s: float, first: list[int], more: list[list[int]]) -> list[Stream]:
        await asyncio.sleep(delay_s)
        history, turns = first, list[Stream]()
        for own in [[], *more]:
            history = history + own
            turns.append(await server.stream(history, 200))
            history = history + turns[-1].token_ids
        return turns

    all_chats = [chat(i / 4, prompt(rng, 1200), [prompt(rng, 80) for _ in range(4)]) for i in range(60)]
    done = await asyncio.gather(*all_chats)
    tpots = ["; ".join(f"{1e3 * sum(c[i].tpot_s for c in done) / len(done):.2f}" for i in range(5))]
    ttfts = "; ".join(f"{1e3 * percentile([c[i].ttft_s for c in done], 0.5):.0f}" for i in range(5))
    return [("60 chats of 5 turns, 4 a second: mean TPOT by turn; median TTFT (ms)", f"{tpots[0]} | {ttfts}", "")]


async def long(server: Client) -> list[Row]:
    """48 streams at a time of 500 in and 200 out; 2 s later 15 prompts of 24,000 tokens, one a second, 16 out."""
    rng, is_over, done = random.Random(3), asyncio.Event(), list[Stream]()

    async def late(delay_s: float, ids: list[int]) -> Stream:
        await asyncio.sleep(delay_s)
        return await server.stream(ids, 16)

    async def keep_busy(own: random.Random) -> None:
        while not is_over.is_set():
            done.append(await server.stream(prompt(own, 500), 200))

    streams = [asyncio.create_task(keep_busy(random.Random(100 + i))) for i in range(48)]
    longs = await asyncio.gather(*(late(2 + i, prompt(rng, 24000)) for i in range(15)))
    is_over.set()
    await asyncio.gather(*streams)
    ttfts = [one.ttft_s for one in longs]
    gaps = [gap for one in done for gap in one.gaps_s]
    return [
        (
            "48 streams beside a prompt of 24,000 a second: its TTFT p50; p90",
            _ms([percentile(ttfts, 0.5), percentile(ttfts, 0.9)]),
            "",
        ),
        (
            "the streams: tokens/s of each; ITL p50; p99",
            f"{1 / (sum(one.tpot_s for one in done) / len(done)):.0f}; "
            + _ms([percentile(gaps, 0.5), percentile(gaps, 0.99)]),
            "",
        ),
    ]


async def many(server: Client) -> list[Row]:
    """400 streams at once of 300 tokens in and 200 out, after 20 others."""
    rng = random.Random(4)
    await asyncio.gather(*(server.stream(prompt(rng, 300), 20) for _ in range(20)))
    began_s = time.perf_counter()
    done = await asyncio.gather(*(server.stream(prompt(rng, 300), 200) for _ in range(400)))
    took_s = time.perf_counter() - began_s
    ttfts = [one.ttft_s for one in done]
    return [
        ("400 streams, 300 / 200: tokens/s", f"{400 * 200 / took_s:,.0f}", ""),
        ("TTFT p50; p90", _ms([percentile(ttfts, 0.5), percentile(ttfts, 0.9)]), ""),
    ]


LOADS: dict[str, Callable[[Client], Coroutine[None, None, list[Row]]]] = {
    "fresh": fresh,
    "chats": chats,
    "long": long,
    "many": many,
}


def _ms(seconds: Sequence[float]) -> str:
    return "; ".join(f"{1e3 * one:,.0f}" for one in seconds) + " ms"


def run(url: str, names: Sequence[str]) -> None:
    server = Client(url, find(url, None).first_model())
    for name in names:
        with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(table(runner.run(LOADS[name](server))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES))
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), default=list(LOADS))
    args, flags = parser.parse_known_args()
    if args.url is not None:
        run(args.url, args.loads)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.write(args.shape, Path(folder))
        named = (str(model), "--tokenizer", str(model), "--load-format", "dummy", "--kernel-cache", f"{folder}/cache")
        log = Path(f"http-loads-{args.shape}.log")
        with serve(*named, *flags, log=log) as server:
            print(f"ready after {server.ready_s:.1f} s; its log: {log}", flush=True)
            run(server.url, args.loads)


if __name__ == "__main__":
    main()
