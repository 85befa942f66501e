"""Memory of each process under mixed load for a long time: does it end to grow?

    python tests/bench/serving/soak_memory.py [--minutes 30] [--streams 12] [FLAGS OF SERVE]

Streams of all lengths on the demo model on the CPU: shared and new prompts, several choices, log-probabilities, new
grammars, chats, and clients that leave. Each minute one line with the MiB of each process: its own memory (anonymous)
and shared memory (the KV pool and masks). At the end, the memory of each process's own in the second and in the last
third of the time; the exit code is 1 if it has grown by more than MOST_GROWTH between them.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp

sys.path.append(str(Path(__file__).parents[1]))  # for rig
from rig import Server, serve

MIB = 1 << 10  # KiB
MOST_GROWTH = 0.05  # of a process between the second and the last third
Body = dict[str, Any]


def body(rng: random.Random, number: int) -> tuple[str, Body]:
    """The path and body of a request that nobody has made before."""
    words = " ".join(f"w{rng.randrange(3000)}" for _ in range(rng.choice((5, 40, 200, 700))))
    base = {"max_tokens": rng.choice((4, 30, 120)), "temperature": 1.0, "seed": number, "stream": True}
    schema = {"type": "object", "properties": {f"f{number}": {"type": "integer"}}, "required": [f"f{number}"]}
    kinds: list[Body] = [
        {"prompt": f"The same beginning of many prompts. {words}"},
        {"prompt": words, "n": 3},
        {"prompt": words, "logprobs": 3},
        {"prompt": words, "structured_outputs": {"json": schema}},
        {"prompt": words, "structured_outputs": {"regex": f"[a-z]{{{number % 90 + 2}}}x{number}"}},
        {"messages": [{"role": "user", "content": words}]},
        {"messages": [{"role": "user", "content": words}], "response_format": {"type": "json_object"}},
    ]
    chosen = rng.choice(kinds)
    return "/v1/chat/completions" if "messages" in chosen else "/v1/completions", base | chosen


class Load:
    """Clients that ask one request after another until the time is over."""

    def __init__(self, server: Server, until_s: float) -> None:
        self.statuses: dict[int, int] = defaultdict(int)
        self._server, self._until_s, self._number = server, until_s, 0

    async def client(self, session: aiohttp.ClientSession, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self._until_s:
            self._number += 1
            path, asked = body(rng, self._number)
            async with session.post(self._server.url + path, json=asked) as answer:
                if rng.random() < 0.1:
                    await answer.content.read(100)  # then the client leaves
                else:
                    await answer.read()
                self.statuses[answer.status] += 1


def memory(pid: int) -> tuple[int, int]:
    """MiB of anonymous and of shared memory that are resident."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anon, shared = (int(fields[name].split()[0]) // MIB for name in ("RssAnon", "RssShmem"))
    return anon, shared


async def watch(server: Server, load: Load, minutes: float, every_s: float) -> dict[str, list[int]]:
    """Prints the table, and returns the anonymous memory of each process over time."""
    history: dict[str, list[int]] = defaultdict(list)
    began = time.monotonic()
    while time.monotonic() - began < minutes * 60:
        await asyncio.sleep(every_s)
        cells: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for pid, title in server.family().items():
            try:
                cells[title].append(memory(pid))
            except (OSError, KeyError):
                continue  # it has ended
        parts = []
        for title, pairs in sorted(cells.items()):
            anon, shared = sum(a for a, _ in pairs), sum(s for _, s in pairs)
            history[title].append(anon)
            parts.append(f"{title[:24]} {anon}+{shared}")
        statuses = ", ".join(f"{count:,} of {status}" for status, count in sorted(load.statuses.items()))
        print(f"{(time.monotonic() - began) / 60:5.1f} min: {'; '.join(parts)} | {statuses}", flush=True)
    return history


async def run(server: Server, minutes: float, streams: int, every_s: float) -> dict[str, list[int]]:
    load = Load(server, time.monotonic() + minutes * 60)
    timeout, connector = aiohttp.ClientTimeout(300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        clients = [asyncio.create_task(load.client(session, seed)) for seed in range(streams)]
        history = await watch(server, load, minutes, every_s)
        await asyncio.gather(*clients)
    return history


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two lines")
    args, flags = parser.parse_known_args()
    with serve("demo", *flags) as server:
        history = asyncio.run(run(server, args.minutes, args.streams, args.every))
    grew = False
    for title, sizes in sorted(history.items()):
        third = len(sizes) // 3
        if third:
            middle, last = statistics.median(sizes[third:-third]), statistics.median(sizes[-third:])
            grew |= last > middle * (1 + MOST_GROWTH)
            print(f"{title}: {sizes[0]} MiB at first, {middle:.0f} in the second third, {last:.0f} in the last one")
    return grew


if __name__ == "__main__":
    sys.exit(main())
