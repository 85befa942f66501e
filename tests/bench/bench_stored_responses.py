"""Memory of one gateway while responses are stored: `bench_stored_responses.py [--responses N] [flags of serve]`.

A ring with the mock worker and its limits at their default. Each request has an input of 20 KB and asks for one token.
The memory after as many responses as are kept is compared with that after all; `--store false` is the same traffic
without storing.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
from rig import rss_mib, serve, table

INPUT_BYTES, KEPT, AT_A_TIME = 20_000, 1000, 8


async def answer(url: str, number: int, stores: bool) -> None:
    body = {"model": "demo", "input": "a " * (INPUT_BYTES // 2), "max_output_tokens": 1, "store": stores}
    body["truncate_prompt_tokens"] = 64  # the tokenizer's and the worker's work is not what is measured
    left = iter(range(number))

    async def one_by_one(http: aiohttp.ClientSession) -> None:
        for _ in left:
            async with http.post(f"{url}/v1/responses", json=body) as response:
                assert response.status == 200, await response.text()

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(one_by_one(http) for _ in range(AT_A_TIME)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--store", choices=("true", "false"), default="true")
    args, flags = parser.parse_known_args()
    with serve("--model", "demo", "--worker-cls", "mock", *flags) as ring:
        [pid] = [pid for title, pid in ring.children().items() if "api_gateway" in title]
        asyncio.run(answer(ring.url, 50, args.store == "true"))
        begun = rss_mib(pid)
        asyncio.run(answer(ring.url, KEPT, args.store == "true"))
        filled, began = rss_mib(pid), time.perf_counter()
        asyncio.run(answer(ring.url, args.responses - KEPT, args.store == "true"))
        took_s, last = time.perf_counter() - began, rss_mib(pid)
    rows = [
        ("memory grown by the first 1,000 responses", f"{filled - begun:.0f} MiB", ""),
        (f"memory grown by the next {args.responses - KEPT:,}", f"{last - filled:.0f} MiB", "10 MiB"),
        ("requests/s", f"{(args.responses - KEPT) / took_s:.0f}", ""),
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
