"""Time to first token of a prompt with a cached prefix, compared with a new prompt, on one server.

    python tests/bench/serving/bench_prefix.py [--shared 3000] [--shape NAME | MODEL FLAG ...]

The demo model in float32 unless given; `--shape` is one of `bench suite`'s, with random weights, for a GPU.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from raw_client import raw_streams
from rig import Row, Server, completion, median, serve, table

from blockyard.services.bench.suite import shapes

NUM_SHARED, NUM_OWN = 3000, 8
ROUNDS = 5
DEMO = ("demo", "--dtype", "float32")


def first_token_s(server: Server, prompt: list[int]) -> float:
    (log,) = raw_streams(server.url, [completion(4, prompt=prompt)])
    return log.events()[0][0] - log.started_s


def prefix_rows(num_shared: int = NUM_SHARED, flags: tuple[str, ...] = DEMO, bar: float = 0.15) -> list[Row]:
    """Each round: a new prompt, then another that differs in its last few tokens. Interleaved, one server."""
    ids = random.Random(0)
    new, seen, ratios = [], [], []
    with serve(*flags) as server:
        for _ in range(ROUNDS + 1):  # the first warms up
            shared = ids.choices(range(100, 4000), k=num_shared)
            new.append(first_token_s(server, shared + ids.choices(range(100, 4000), k=NUM_OWN)))
            seen.append(first_token_s(server, shared + ids.choices(range(100, 4000), k=NUM_OWN)))
            ratios.append(seen[-1] / new[-1])
    text = (
        f"{median(ratios[1:]):.3f} ({1000 * median(seen[1:]):.1f} ms against {1000 * median(new[1:]):.0f} ms, "
        f"{ROUNDS} pairs: {min(ratios[1:]):.3f} to {max(ratios[1:]):.3f})"
    )
    what = "demo model, CPU" if flags == DEMO else Path(flags[0]).name
    return [(f"TTFT with {num_shared:,} shared prompt tokens against a new prompt, {what}", text, f"{bar:g}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=int, default=NUM_SHARED)
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES))
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            more = ("--load-format", "dummy", "--max-model-len", str(args.shared + 4096))
            print(table(prefix_rows(args.shared, (str(shapes.write(args.shape, Path(folder))), *more, *flags), 0.05)))
        else:
            print(table(prefix_rows(args.shared, tuple(flags) or DEMO)))


if __name__ == "__main__":
    main()
