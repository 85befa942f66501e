"""Structured output over HTTP: a schema's first request, floods of new and of hostile grammars, a matcher killed."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import aiohttp
from raw_client import raw_statuses, raw_streams
from rig import Row, Server, StreamLog, completion, median, percentile, serve, stream, streams
from structured_output.hostile_grammars import hostile

from blockyard.shared.messages import GrammarKind
from blockyard.shared.process.settings import give_way

NUM_FIELDS = 400
Body = dict[str, Any]
KEYS = {GrammarKind.REGEX: "regex", GrammarKind.EBNF: "grammar"}


def new_schema(name: str, num_fields: int = NUM_FIELDS) -> Body:
    """An object of so many required fields, in ten types. No two names give the same schema."""
    kinds: list[Body] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]},
        {"anyOf": [{"type": "string", "maxLength": 10}, {"type": "null"}]},
        {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
        {"const": name},
    ]
    fields = {f"field_{name}_{i}": kinds[i % len(kinds)] for i in range(num_fields)}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def guided(num_tokens: int, schema: Body, **fields: object) -> Body:
    return completion(num_tokens, **{"structured_outputs": {"json": schema}} | fields)


def itl_s(logs: list[StreamLog], since_s: float = 0.0) -> list[float]:
    """Times between tokens of all streams, of tokens that came after `since_s`."""
    return [b - a for log in logs for a, b in pairwise(log.events_s) if b >= since_s]


def first_requests(rounds: int) -> list[Row]:
    """TTFT of one request at a time: without a schema, with one never seen, and with the same one again."""
    new, seen, plain = [], [], []

    async def measure(url: str) -> None:
        async with aiohttp.ClientSession() as session:

            async def ttft_ms(body: Body) -> float:
                log = await stream(session, url, body)
                return 1e3 * (log.events_s[0] - log.started_s)

            await ttft_ms(guided(4, new_schema("warm")))  # starts the processes
            await asyncio.sleep(2)
            for i in range(rounds):
                body = guided(4, new_schema(f"r{i}"))
                plain.append(await ttft_ms(completion(4)))
                new.append(await ttft_ms(body))
                seen.append(await ttft_ms(body))
                plain[-1] = median([plain[-1], await ttft_ms(completion(4))])

    with serve("demo") as server:
        asyncio.run(measure(server.url))
    what = f"a schema never seen, {NUM_FIELDS} fields: TTFT beyond the same request without"
    return [
        (what, _spread([a - b for a, b in zip(new, plain, strict=True)]), "150 ms"),
        ("the same schema again: TTFT beyond", _spread([a - b for a, b in zip(seen, plain, strict=True)]), "5 ms"),
        ("TTFT without", _spread(plain), ""),
    ]


def _spread(values_ms: list[float]) -> str:
    return f"{median(values_ms):.1f} ms (90 % within {percentile(values_ms, 0.9):.1f}; n {len(values_ms)})"


@contextlib.asynccontextmanager
async def flood(server: Server, kind: str, count: int, per_s: float) -> AsyncIterator[Counter[str]]:
    """Sends requests from a process of their own. per_s: 0 sends all at once. Yields the answers by status, filled
    when the block ends."""
    command = [sys.executable, __file__, server.url, kind, str(count), str(per_s), str(time.time_ns())]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None and child.stdin is not None
    await child.stdout.readline()  # its bodies are made
    child.stdin.write(b"go\n")
    statuses: Counter[str] = Counter()
    yield statuses
    out, _ = await child.communicate()
    assert child.returncode == 0, "the flood failed"
    statuses.update(json.loads(out))


def bodies_of(kind: str, count: int, name: str) -> list[Body]:
    if kind == "schemas":
        return [guided(8, new_schema(f"{name}{i}", 40)) for i in range(count)]
    if kind == "malformed":  # the control: refused by the gateway, as many requests without a grammar
        return [completion(8, temperature=-1.0) for _ in range(count)]
    made = hostile(count, name)
    return [completion(8, structured_outputs={KEYS[one.kind]: one.source}) for one in made]


async def send_flood(url: str, bodies: list[Body], per_s: float) -> Counter[str]:
    """Answers by status; a request without any answer counts as `none`."""
    connector = aiohttp.TCPConnector(limit=0)
    datas = [json.dumps(body).encode() for body in bodies]
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:

        async def send(i: int, data: bytes) -> str:
            await asyncio.sleep(i / per_s)
            try:
                async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
                    await answer.read()
                    return str(answer.status)
            except (aiohttp.ClientError, TimeoutError) as e:
                return f"none: {type(e).__name__}"

        return Counter(await asyncio.gather(*(send(i, data) for i, data in enumerate(datas))))


def main(url: str, kind: str, count: int, per_s: float, name: str) -> None:
    """The process of `flood`. It runs at low priority: what sending costs is not the server's."""
    give_way()
    bodies = bodies_of(kind, count, name)
    print("ready", flush=True)
    sys.stdin.readline()
    statuses = asyncio.run(send_flood(url, bodies, per_s)) if per_s else Counter(raw_statuses(url, bodies, 120.0))
    print(json.dumps(statuses))


def arrivals(rounds: int) -> list[Row]:
    """Plain streams of a mock worker, alone and while new schemas arrive, in turns."""
    num_tokens, step_ms = 250, 20
    bodies = [completion(num_tokens, prompt=f"def stream_{i}():", seed=i) for i in range(32)]
    statuses: Counter[str] = Counter()

    async def measure(server: Server) -> tuple[list[float], list[float]]:
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(1e3 * percentile(itl_s(await streams(server.url, bodies)), 0.99))
            async with flood(server, "schemas", 20 * num_tokens * step_ms // 1000, 20) as answers:
                beside.append(1e3 * percentile(itl_s(await streams(server.url, bodies)), 0.99))
            statuses.update(answers)
        return alone, beside

    with serve("demo", "--worker-cls", "mock", "--mock-step-ms", str(step_ms)) as server:
        alone, beside = asyncio.run(measure(server))
    what = "32 plain streams (mock worker, 20 ms a step) while 20 new schemas a second arrive: p99 ITL against alone"
    return [(what, _against(beside, alone), "1.1"), ("answers to the new schemas", _counts(statuses), "")]


def hostile_flood(rounds: int) -> list[Row]:
    """16 plain and 16 guided streams: alone, beside requests that the gateway refuses, beside hostile grammars.

    The streams are read by a client that costs a few microseconds an event, and the flood is sent at low priority.
    """
    count, num_tokens = 2000, 400
    schema = {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"type": "string", "maxLength": 30}}},
    }
    schema["properties"]["items"]["minItems"] = 1000  # type: ignore[index]
    schema["required"] = ["items"]
    bodies = [completion(num_tokens, prompt=f"def stream_{i}():", seed=i) for i in range(16)]
    bodies += [guided(num_tokens, schema, prompt=f"stream {i}", seed=i, temperature=1.0) for i in range(16)]
    statuses: Counter[str] = Counter()
    figures: dict[str, list[list[float]]] = {"alone": [], "malformed": [], "hostile": []}

    async def measure(server: Server, kind: str) -> list[float]:
        """p99 ITL of the plain and of the guided streams, ms."""
        running = asyncio.create_task(asyncio.to_thread(raw_streams, server.url, bodies))
        if kind != "alone":
            await asyncio.sleep(0.5)
            async with flood(server, kind, count, 0) as answers:
                await running
            if kind == "hostile":
                statuses.update(answers)
        arrivals = [[at for at, _ in log.events()] for log in await running]
        times = [[b - a for one in part for a, b in pairwise(one)] for part in (arrivals[:16], arrivals[16:])]
        return [1e3 * percentile(part, 0.99) for part in times]

    async def all_rounds(server: Server) -> None:
        await streams(server.url, bodies)
        for _ in range(rounds):
            for kind, seen in figures.items():
                seen.append(await measure(server, kind))

    with serve("demo") as server:
        asyncio.run(all_rounds(server))
    rows = []
    for kind, bar in (("hostile", "1.2"), ("malformed", "control")):
        for i, name in enumerate(("plain", "guided")):
            ratio = _against([one[i] for one in figures[kind]], [one[i] for one in figures["alone"]])
            rows.append((f"{count} {kind} requests at once: p99 ITL of 16 {name} streams against alone", ratio, bar))
    return [*rows, ("answers to the hostile grammars", _counts(statuses), "only 4xx")]


def killed(rounds: int) -> list[Row]:
    """64 guided streams with and without a kill of the matcher."""
    schema = new_schema("k", 60)
    bodies = [guided(150, schema, prompt=f"stream {i}", seed=i, temperature=1.0) for i in range(64)]
    altered, pauses, usual = 0, [], []

    async def kill(server: Server) -> tuple[list[StreamLog], float]:
        running = asyncio.create_task(streams(server.url, bodies))
        await asyncio.sleep(1.0)
        pids = server.matchers()
        assert pids and not running.done()
        began = time.perf_counter()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return await running, began

    with serve("demo", "--dtype", "float32", "--batch-invariant", "--max-num-seqs", "64") as server:
        expected = [log.text for log in asyncio.run(streams(server.url, bodies))]
        for _ in range(rounds):
            logs = asyncio.run(streams(server.url, bodies))
            usual.append(max(itl_s(logs)))
            altered += sum(log.text != text for log, text in zip(logs, expected, strict=True))
            logs, began = asyncio.run(kill(server))
            pauses.append(max(itl_s(logs, began)))
            altered += sum(log.text != text for log, text in zip(logs, expected, strict=True))
    what = "the matcher killed (kill -9) with 64 guided streams open"
    return [
        (f"{what}: texts altered", f"{altered} of {128 * rounds}", "0"),
        (
            f"{what}: longest pause of a stream",
            f"{median(pauses):.2f} s (worst of {rounds}: {max(pauses):.2f})",
            "1.5 s",
        ),
        ("longest pause without the kill", f"{median(usual):.2f} s", ""),
    ]


def _against(values: list[float], control: list[float]) -> str:
    """The ratio of medians over rounds, and the ratio of each round."""
    ratios = [a / b for a, b in zip(values, control, strict=True)]
    return (
        f"{median(values) / median(control):.2f} ({median(values):.1f} to {median(control):.1f} ms; "
        f"rounds {min(ratios):.2f} to {max(ratios):.2f})"
    )


def _counts(statuses: Counter[str]) -> str:
    return ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), f"n{sys.argv[5]}x")
