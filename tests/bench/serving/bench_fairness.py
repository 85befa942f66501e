"""Two API keys on a real ring: how long one waits for its first token while the other floods, and what that costs.

    python tests/bench/serving/bench_fairness.py [--seconds 30] [--gaps] [MODEL FLAG ...]

MODEL is the demo model unless given. With `--gaps` instead: the time from one step of the mock worker to the next.
"""

import argparse
import asyncio
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

import uvloop
from raw_client import RawLog, raw_streams
from rig import Row, completion, percentile, serve, table

from blockyard.services.bench.load import client
from blockyard.services.bench.workload import due_times

FLOOD = 100
KEYS = ("--api-key", "light-key", "heavy-key")
STEP_MS = (0.5, 2.0, 5.0)
POLICIES: dict[str, tuple[str, ...]] = {
    "fair": ("--scheduling-policy", "fair"),
    "fair, plans 1 ahead": ("--scheduling-policy", "fair", "--run-ahead", "1"),
    "fcfs": ("--scheduling-policy", "fcfs"),
}


def requests(rate: float, seconds: float, seed: int) -> tuple[list[dict[str, object]], list[float]]:
    rng = random.Random(seed)
    num = max(1, int(rate * seconds))
    bodies = []
    for _ in range(num):
        num_prompt, num_tokens = (min(400, max(4, int(rng.lognormvariate(mu, 0.9)))) for mu in (4.0, 3.4))
        prompt = [rng.randrange(10, 4000) for _ in range(num_prompt)]
        bodies.append(completion(num_tokens, prompt=prompt, stream=True))
    return bodies, due_times(num, rate, 1.0, rng)


def run(port: int, loads: dict[str, tuple[list[dict[str, object]], list[float]]]) -> dict[str, list[float]]:
    """Seconds to the first token of each key's requests that were not refused, and when the last token came."""
    everything = []
    for key, (bodies, due) in loads.items():
        target = client.Endpoint("127.0.0.1", port, headers=(("Authorization", f"Bearer {key}"),))
        everything += [(at, key, target.request(body)) for body, at in zip(bodies, due, strict=True)]
    everything.sort(key=lambda one: one[0])
    load = client.LoadRun(clock=time.time)
    plan = client.LoadPlan([request for _, _, request in everything], [at for at, _, _ in everything])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client.run(client.Endpoint("127.0.0.1", port), plan, load))
    found: dict[str, list[float]] = {key: [] for key in loads}
    for (_, key, _), exchange in zip(everything, load.exchanges, strict=True):
        if not exchange.is_refused and (events := RawLog(exchange.sent_s, exchange.pieces).events()):
            found[key].append(events[0][0] - exchange.sent_s)
    return found


def fairness_rows(seconds: float, rate: float, model: list[str]) -> list[Row]:
    light, heavy = requests(rate, seconds, 1), requests(rate * FLOOD, seconds, 2)
    rows: list[Row] = []
    for name, flags in POLICIES.items():
        with serve(*model, *KEYS, *flags, "--no-enable-prefix-caching") as server:
            run(server.port, {"light-key": requests(4.0, 2.0, 3)})
            alone = run(server.port, {"light-key": light})["light-key"]
            flooded = run(server.port, {"light-key": light, "heavy-key": heavy})
        before, after = percentile(alone, 0.95), percentile(flooded["light-key"], 0.95)
        text = (
            f"{after / before:.2f} times ({1e3 * after:.0f} ms to {1e3 * before:.0f} ms, {len(alone)} requests, "
            f"p50 {1e3 * percentile(flooded['light-key'], 0.5):.0f} ms to {1e3 * percentile(alone, 0.5):.0f} ms; "
            f"heavy {1e3 * percentile(flooded['heavy-key'] or [0.0], 0.95):,.0f} ms, "
            f"{len(flooded['heavy-key'])} of {len(heavy[0])} taken)"
        )
        rows.append((f"light key's p95 TTFT, flooded to alone, {name}", text, "2 times" if name == "fair" else "-"))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def gap_rows(seconds: float) -> list[Row]:
    """Eight streams of the mock worker; a step that begins late ends late."""
    rows: list[Row] = []
    for step_ms in STEP_MS:
        for name, flags in POLICIES.items():
            with serve("demo", "--worker-cls", "mock", "--mock-step-ms", str(step_ms), *flags) as server:
                num = int(1000 * seconds / step_ms / len(STEP_MS))
                logs = raw_streams(server.url, [completion(min(num, 3000), return_stamps=True) for _ in range(8)])
            stamps = sorted({chunk.stamp for log in logs for _, chunk in log.events()[20:-1] if chunk.stamp})
            gaps = [1e3 * (b - a) for a, b in pairwise(stamps)]
            mean = (stamps[-1] - stamps[0]) * 1e3 / len(gaps)
            text = f"mean {mean:.3f}, p50 {percentile(gaps, 0.5):.3f}, p99 {percentile(gaps, 0.99):.2f} ms"
            rows.append((f"mock worker, from one step's end to the next one's, {name}", text, f"{step_ms} ms"))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second of the light key")
    parser.add_argument("--gaps", action="store_true")
    args, model = parser.parse_known_args()
    rows = gap_rows(args.seconds) if args.gaps else fairness_rows(args.seconds, args.rate, model or ["demo"])
    print(table(rows))


if __name__ == "__main__":
    main()
