"""Random kills of services under load, or none; every answer is compared with the answer of an undisturbed run.

python tests/bench/serving/soak.py [--answers 1000] [--kills 100] [--victims gpu_worker] [--roles]
[--freezes 7] [--grammars] [FLAGS OF SERVE]

Without flags it is a ring of two mock workers, whose tokens do not depend on KV: a plan that contradicts what came
before ends one of them, which is counted as `broken`. With `--roles` it is two that prefill and two that decode: a plan
that reads KV of other tokens ends a mock worker too. With `--device cpu --dtype float32` it is the demo model; its
answers must be equal with `--batch-invariant`, and up to ties, which are counted, without it. At the end no block may
be in use, and no transfer open.

With `--freezes SECONDS` every second fault stops a process for up to so long, instead of killing it. With `--grammars`
every second request has a new grammar instead: its status and its answer's form count. The demo model can do so,
mock workers make no masks.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

sys.path.append(str(Path(__file__).parents[1]))  # for rig
sys.path.append(str(Path(__file__).parents[2] / "support"))  # ties.py

from demo_reference import Reference
from rig import Server, completion, serve
from ring_state import left_over, scheduler_stats, wait_for
from several_choices import Answer, Body, RefusedError, ask, bodies

WHATS = ("answers", "choices", "grammars", "changed", "ties", "failed")
VICTIMS = "detokenizer,gpu_worker,scheduler,tokenizer_pool,message_bus"
MOCK = ("--worker-cls", "mock", "--mock-step-ms", "10")
RING = ("--detokenizers", "2", "--tokenizers", "2")
UNIFIED = ("--data-parallel-size", "2")
ROLES = ("--prefill-workers", "2", "--decode-workers", "2", "--decode-prefill-tokens", "0")
UNIFIED_WORKERS = ("gpu_worker 0", "gpu_worker 1")
ROLE_WORKERS = ("gpu_worker prefill 0", "gpu_worker prefill 1", "gpu_worker decode 0", "gpu_worker decode 1")
ANSWER_S = 300.0  # after which an answer is lost
RUNS_S = 35.0  # between two kills of one that requests need to be accepted: after 30 s it is restarted without delay
NEEDED = ("scheduler", "message_bus")  # gateways refuse requests when a model was away for 20 s
MOST_SHOWN = 5
TELL_EVERY = 100  # answers
COUNTED = ("preemptions", "transfers_landed", "transfers_aborted")


@dataclass
class Tally:
    """What became of the answers."""

    counts: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    changed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[what]:,} {what}" for what in WHATS)
        kills = ", ".join(f"{count} {name}" for name, count in sorted(self.killed.items()))
        return f"{counts}; {self.killed.total()} kills: {kills or 'none'}"


class Soak:
    def __init__(
        self, server: Server, workers: tuple[str, ...], asked: list[Body], reference: Reference | None
    ) -> None:
        """`reference`: judges answers that differ."""
        self.tally = Tally()
        self._server, self._workers, self._asked, self._reference = server, workers, asked, reference
        self._expected: list[Answer] = []
        self._next: Iterator[int] = itertools.count()
        self._spared_until = dict.fromkeys(NEEDED, 0.0)
        self._is_over = False
        self.freeze_s, self.with_grammars = 0.0, False

    async def run(self, num_answers: int, num_streams: int, kills: int, victims: list[str]) -> None:
        await wait_for(self._server, self._workers)
        timeout, connector = aiohttp.ClientTimeout(ANSWER_S), aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            for body in self._asked:
                self._expected.append(await ask(session, self._server.url, body))
            clients = [self._client(session, num_answers, kills) for _ in range(num_streams)]
            killer = asyncio.create_task(self._kill(session, num_answers, kills, victims))
            await asyncio.gather(*clients)
            self._is_over = True
            await killer

    async def _client(self, session: aiohttp.ClientSession, num_answers: int, kills: int) -> None:
        """Asks one after another, until there were enough answers and enough kills."""
        while (number := next(self._next)) < num_answers or self.tally.killed.total() < kills:
            place = number % len(self._asked)
            try:
                if self.with_grammars and number % 2:
                    await self._ask_new_grammar(session, number)
                    continue
                got = await ask(session, self._server.url, self._asked[place])
            except (RefusedError, aiohttp.ClientError, TimeoutError) as e:
                self.tally.counts["failed"] += 1
                self._show(f"{place}: {type(e).__name__} {e}")
                await asyncio.sleep(0.5)
                continue
            self._take(place, got)

    async def _ask_new_grammar(self, session: aiohttp.ClientSession, number: int) -> None:
        """Raises RefusedError."""
        name = f"field {number}"
        asked = completion(20, prompt=f"{number}:", structured_outputs={"regex": f"{name} (yes|no)"})
        async with session.post(f"{self._server.url}/v1/completions", json=asked | {"ignore_eos": False}) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise RefusedError(f"{answer.status}: {text[-500:]}")
        self.tally.counts["answers"] += 1
        self.tally.counts["grammars"] += 1
        if name not in json.loads(text)["choices"][0]["text"]:
            self.tally.counts["changed"] += 1
            self._show(f"{number}: {text}")

    def _take(self, place: int, got: Answer) -> None:
        counts, body, expected = self.tally.counts, self._asked[place], self._expected[place]
        counts["answers"] += 1
        counts["choices"] += len(got)
        if counts["answers"] % TELL_EVERY == 0:
            print(self.tally, flush=True)
        if got == expected:
            return
        if self._reference is not None and self._reference.explains(body, expected, got):
            counts["ties"] += 1
            return
        counts["changed"] += 1
        parts = [_first_difference(*pair) for pair in zip(expected, got, strict=False)]
        kind = {k: v for k, v in body.items() if k in {"n", "best_of", "use_beam_search", "temperature"}}
        self._show(f"{place}: {kind} changed; choices part at {parts}")

    def _show(self, line: str) -> None:
        self.tally.changed.append(line)
        if len(self.tally.changed) <= MOST_SHOWN:
            print(line, flush=True)

    async def _kill(self, session: aiohttp.ClientSession, num_answers: int, kills: int, victims: list[str]) -> None:
        """One at a time, with the same number of answers between two; a worker has worked for a while before."""
        rng = random.Random(0)
        while not self._is_over and self.tally.killed.total() < kills:
            await asyncio.sleep(rng.uniform(0.05, 1.0))
            if self.tally.killed.total() * num_answers > self.tally.counts["answers"] * kills:
                continue  # the ring would do little but recover
            idle = await self._idle_workers(session, rng.randrange(5, 60))
            names = {title: pid for pid, title in self._server.family().items()}
            now = time.monotonic()
            spared = {name for name, until in self._spared_until.items() if now < until}
            found = [name for name in names if any(v in name for v in victims) and name not in idle | spared]
            if found:
                name = rng.choice(sorted(found))
                if self.freeze_s and rng.random() < 0.5:
                    await self._freeze(names[name], rng.uniform(0.0, self.freeze_s))
                    self.tally.killed[f"{name} frozen"] += 1
                    continue
                os.kill(names[name], signal.SIGKILL)
                self.tally.killed[name] += 1
                if name in NEEDED:
                    self._spared_until[name] = now + RUNS_S

    async def _freeze(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    async def _idle_workers(self, session: aiohttp.ClientSession, least_steps: int) -> set[str]:
        """Workers that are not in the ring, or have done fewer steps than `least_steps`."""
        async with session.get(f"{self._server.url}/ring") as answer:
            members = {m["name"]: m["stats"]["steps_total"] for m in (await answer.json())["members"] if m["ready"]}
        return {name for name in self._workers if members.get(name, 0) < least_steps}


def _first_difference(expected: list[int], got: list[int]) -> int:
    """-1: none."""
    return next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), -1)


async def last_look(server: Server, workers: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Counters since the scheduler's start, and what is left when all answers have ended and all workers are back."""
    await wait_for(server, workers)
    left = await left_over(server)
    stats = await scheduler_stats(server)
    return {name: stats[f"{name}_total"] for name in COUNTED}, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1000, help="at least so many")
    parser.add_argument("--kills", type=int, default=100, help="at least so many")
    parser.add_argument("--victims", default=VICTIMS)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40, help="of each choice")
    parser.add_argument("--bodies", type=int, default=60)
    parser.add_argument("--freezes", type=float, default=0.0, help="the most seconds of one")
    parser.add_argument("--grammars", action="store_true", help="half of the requests have a new grammar")
    parser.add_argument("--roles", action="store_true", help="workers that prefill and workers that decode")
    args, flags = parser.parse_known_args()
    workers, layout = (ROLE_WORKERS, ROLES) if args.roles else (UNIFIED_WORKERS, UNIFIED)
    is_mock = "--device" not in flags
    is_exact = is_mock or "--batch-invariant" in flags
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with serve("demo", *(MOCK if is_mock else ()), *RING, *layout, *flags, log=log) as server:
            soak = Soak(server, workers, bodies(args.bodies, args.tokens), None if is_exact else Reference())
            soak.freeze_s, soak.with_grammars = args.freezes, args.grammars
            asyncio.run(soak.run(args.answers, args.streams, args.kills, args.victims.split(",")))
            counters, left = asyncio.run(last_look(server, workers))
        broken = log.read_text("utf-8", "replace").count("PlanError:")
    counted = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counters.items())
    print(f"{soak.tally}; {broken} broken plans; since the scheduler's start {counted}; left over: {left or 'nothing'}")
    print(f"{time.monotonic() - began:.0f} s, flags: {' '.join(flags) or 'none'}")
    return bool(soak.tally.counts["changed"] or soak.tally.counts["failed"] or broken or left)


if __name__ == "__main__":
    sys.exit(main())
