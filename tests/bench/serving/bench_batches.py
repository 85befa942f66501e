"""Time to first token of online requests beside a batch, to that without: `bench_batches.py [--policy P]`.

One ring with the mock worker at 20 ms a step. Online requests arrive at half of what its slots serve, first alone and
then beside a batch of 5,000 lines over HTTP. A Poisson process of one seed sets the arrivals of both runs.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))
from rig import serve

STEP_MS, SLOTS, TOKENS = 20, 32, 32
LINES = 5000
RATE = 0.5 * SLOTS / (TOKENS * STEP_MS / 1000)  # requests a second at half load
BODY = {"model": "demo", "prompt": "Hello there", "max_tokens": TOKENS, "ignore_eos": True}


async def ttft_s(http: aiohttp.ClientSession, url: str) -> float:
    began = time.perf_counter()
    async with http.post(f"{url}/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        await response.content.readuntil(b"\n\n")
        first_s = time.perf_counter() - began
        await response.read()
    return first_s


async def online(http: aiohttp.ClientSession, url: str, seconds: float) -> list[float]:
    rng, tasks, until = random.Random(1), [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        await asyncio.sleep(rng.expovariate(RATE))
        tasks.append(asyncio.create_task(ttft_s(http, url)))
    return sorted(await asyncio.gather(*tasks))


async def start_batch(http: aiohttp.ClientSession, url: str) -> str:
    line = {"method": "POST", "url": "/v1/completions", "body": BODY}
    data = "".join(json.dumps({"custom_id": str(i)} | line) + "\n" for i in range(LINES))
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", data.encode(), filename="in.jsonl")
    async with http.post(f"{url}/v1/files", data=form) as response:
        asked = {"input_file_id": (await response.json())["id"], "endpoint": "/v1/completions"}
    async with http.post(f"{url}/v1/batches", json=asked | {"completion_window": "24h"}) as response:
        return str((await response.json())["id"])


async def measure(url: str, seconds: float) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await online(http, url, 3.0)  # warms up
        for run in range(2):
            alone = await online(http, url, seconds)
            batch = await start_batch(http, url)
            await asyncio.sleep(3.0)
            beside = await online(http, url, seconds)
            async with http.get(f"{url}/v1/batches/{batch}") as response:
                counts = (await response.json())["request_counts"]
            async with http.post(f"{url}/v1/batches/{batch}/cancel", json={}) as response:
                await response.read()
            await asyncio.sleep(3.0)
            p99 = [times[int(0.99 * len(times))] * 1000 for times in (alone, beside)]
            p50 = [statistics.median(times) * 1000 for times in (alone, beside)]
            print(
                f"run {run}: {len(alone)} and {len(beside)} requests at {RATE:.0f}/s; "
                f"p50 {p50[0]:.1f} and {p50[1]:.1f} ms; p99 {p99[0]:.1f} and {p99[1]:.1f} ms, "
                f"ratio {p99[1] / p99[0]:.2f}; lines answered {counts['completed']}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mock = ("--model", "demo", "--worker-cls", "mock", "--mock-step-ms", str(STEP_MS), "--max-num-seqs", str(SLOTS))
        with serve(*mock, "--scheduling-policy", args.policy, "--batch-dir", folder) as ring:
            asyncio.run(measure(ring.url, args.seconds))


if __name__ == "__main__":
    main()
