"""Two prefill and two decode workers of the demo model on this machine's CPU, against one unified worker.

`python tests/bench/handovers/bench_pd.py [--connectors shm tcp] [--requests 200] [--batch-invariant]`

Every request is greedy or seeded, and every prompt is handed over. Answers must be equal; without `--batch-invariant`
up to ties, which are counted. After the last answer no transfer may be open and no block held, on either side.
The rates of connectors are printed by bench_kv_transfer.py, `schedule()` and placement by
scheduling/bench_scheduler.py, and the simulator by `blockyard simulate`.
"""

import argparse
import asyncio
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import aiohttp

sys.path.append(str(Path(__file__).parents[2] / "support"))  # ties.py

from demo_reference import Reference
from rig import Row, Server, completion, serve, table
from ring_state import left_over, scheduler_stats, wait_for
from several_choices import Answer, Body, ask

MODEL = ("demo", "--device", "cpu", "--dtype", "float32", "--max-model-len", "1024")
ROLES = ("--prefill-workers", "2", "--decode-workers", "2", "--decode-prefill-tokens", "0")
NUM_AT_ONCE = 16
WORKERS = ("gpu_worker prefill 0", "gpu_worker prefill 1", "gpu_worker decode 0", "gpu_worker decode 1")
COUNTED = ("transfers_landed_total", "transfers_aborted_total")


def requests(count: int) -> list[Body]:
    """Prompts of 20 to 300 tokens; every second request samples with a seed."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        prompt = [300 + (7 * i + j) % 3000 for j in range(rng.randint(20, 300))]
        sampling = {"temperature": 0.8, "top_p": 0.9} if i % 2 else {}
        made.append(completion(rng.randint(8, 48), **{"prompt": prompt, "seed": i, "stream": True} | sampling))
    return made


async def answers(server: Server, bodies: list[Body]) -> list[Answer]:
    limit = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(session: aiohttp.ClientSession, body: Body) -> Answer:
        async with limit:
            return await ask(session, server.url, body)

    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*(one(session, body) for body in bodies))


def connector_flags(connector: str) -> list[str]:
    """tcp and nixl without encryption: this ring has no keys."""
    flags = ["--kv-transfer-config.kv_connector", connector, "--kv-transfer-config.kv_role", "kv_both"]
    return flags if connector == "shm" else [*flags, "--kv-transfer-config.kv_connector_extra_config.encrypt", "false"]


def rows(connectors: list[str], count: int, flags: list[str]) -> list[Row]:
    bodies = requests(count)
    with serve(*MODEL, *flags) as server:
        expected = asyncio.run(answers(server, bodies))
    reference = Reference()
    found: list[Row] = []
    for connector in connectors:
        with serve(*MODEL, *ROLES, *connector_flags(connector), *flags) as server:
            asyncio.run(wait_for(server, WORKERS))
            began = time.monotonic()
            got = asyncio.run(answers(server, bodies))
            seconds = time.monotonic() - began
            left = asyncio.run(left_over(server))
            totals = asyncio.run(scheduler_stats(server))
        differing = [i for i in range(count) if got[i] != expected[i]]
        wrong = [i for i in differing if not reference.explains(bodies[i], expected[i], got[i])]
        num_tokens = sum(len(ids) for answer in got for ids in answer)
        bar = "0 wrong, " + ("0 ties" if "--batch-invariant" in flags else "1 tie in 100,000 tokens")
        equal = f"{len(wrong)} wrong, {len(differing) - len(wrong)} ties in {num_tokens:,} tokens, {seconds:.0f} s"
        found.append((f"{connector}: {count} answers against one unified worker", equal, bar))
        landed = ", ".join(f"{totals[name]} {name.removesuffix('_total')}" for name in COUNTED)
        found.append((f"{connector}: transfers", landed, f"{count} landed"))
        found.append((f"{connector}: left at the end", ", ".join(f"{n} {k}" for k, n in left.items()) or "0", "0"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = ["shm", "tcp"] + ["nixl"] * any(find_spec(name) for name in ("nixl", "nixl_cu13"))
    parser.add_argument("--connectors", nargs="+", default=installed)
    parser.add_argument("--requests", type=int, default=200)
    args, flags = parser.parse_known_args()
    print(table(rows(args.connectors, args.requests, flags)))


if __name__ == "__main__":
    main()
