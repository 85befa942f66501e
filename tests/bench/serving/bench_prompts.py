"""Host cost of a long prompt, from the client's POST to its first token: a mock worker, prompts of token ids.

Prompts of one length share all but their last 128 tokens, so that all but the first are in the prefix cache.
CPU times are of whole requests of two tokens, by process; on a
shared machine they say more than the clock.

    python tests/bench/serving/bench_prompts.py [--lengths 128 2048 8192 16512 32000] [--rounds 13]
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from raw_client import raw_streams
from rig import Row, Server, serve, table

from blockyard.services.bench.datasets import RandomIds
from blockyard.services.bench.suite import shapes

OWN = 128  # tokens of a prompt that no other one has
BARS = {128: "4.5 ms", 16512: "12 ms", 32000: "20 ms"}
SERVICES = ("api_gateway", "tokenizer_pool", "scheduler", "gpu_worker", "detokenizer")


def rows(lengths: list[int], rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.write("llama-3.1-8b", Path(folder))
        most = str(max(lengths) + OWN)
        limits = ("--max-model-len", most, "--max-num-batched-tokens", most, "--num-gpu-blocks-override", "30000")
        with serve(str(model), "--tokenizer", str(model), "--worker-cls", "mock", *limits) as server:
            return [_row(server, length, rounds) for length in [lengths[0], *lengths]][1:]


def _row(server: Server, length: int, rounds: int) -> Row:
    draw, rng = RandomIds(100, 4000), random.Random(length)
    shared = draw(rng, length - OWN)
    waits, costs = [], []
    for _ in range(rounds + 1):  # the first fills the cache
        body = {"prompt": shared + draw(rng, OWN), "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
        before = _cpu_ms(server)
        (log,) = raw_streams(server.url, [body | {"stream": True, "temperature": 0.0}])
        after = _cpu_ms(server)
        waits.append(1000 * (log.events()[0][0] - log.started_s))
        costs.append([after[name] - before[name] for name in SERVICES])
    cpu = [statistics.median(cost[i] for cost in costs[1:]) for i in range(len(SERVICES))]
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in zip(SERVICES, cpu, strict=True))
    text = f"{min(waits[1:]):.1f} to p50 {statistics.median(waits[1:]):.1f} ms; CPU ms: {parts}"
    return f"first token, {length:,} ids, all but {OWN} cached", text, BARS.get(length, "")


def _cpu_ms(server: Server) -> dict[str, float]:
    """CPU time of each service: the kernel counts it by thread, to the nanosecond."""
    found = dict.fromkeys(SERVICES, 0.0)
    for title, pid in server.children().items():
        for name in SERVICES:
            if name in title:
                threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
                found[name] += sum(int(t.read_text().split()[0]) for t in threads) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 2048, 8192, 16512, 32000])
    parser.add_argument("--rounds", type=int, default=13)
    args = parser.parse_args()
    print(table(rows(args.lengths, args.rounds)))


if __name__ == "__main__":
    main()
