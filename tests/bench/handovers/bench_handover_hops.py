"""Where the time of a handover goes, from the end of the prefill's last step to the end of the first decode step.

`python tests/bench/handovers/bench_handover_hops.py [--prompt 8192] [--runs 20] MODEL [FLAGS]`

Starts a server with one prefill and one decode worker, and sends prompts one after another. FLAGS are those of
`blockyard serve`; with `--worker-cls mock` no model is needed and blocks have the mock's size. Each row is the median
time after the end of the prefill's last step, as the worker's loop sees it, of the last such moment of a handover.
"""

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import aiohttp
from rig import Row, Server, completion, serve, table

ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--no-enable-prefix-caching")
NUM_OUTPUT = 24
ROWS = {
    "written": "blocks written by the sender",
    "heard": "frame of it at the receiver",
    "landed": "blocks landed, checksums compared",
    "told": "KVLanded sent by the decode worker",
    "known": "KVLanded at the scheduler",
    "planned": "plan with the sequence built",
    "received": "plan at the decode worker",
    "launched": "its step launched; on a CPU computed",
    "computed": "its result, the second token",
}


async def gaps(server: Server, num_prompt: int, seed: int) -> list[float]:
    """Times between the tokens of one request."""
    rng, times = random.Random(seed), list[float]()
    prompt = [rng.randrange(300, 3000) for _ in range(num_prompt)]
    body = completion(NUM_OUTPUT, prompt=prompt, stream=True, ignore_eos=True, return_token_ids=True)
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def handovers(folder: Path) -> list[dict[str, float]]:
    """The last moment of each kind, of each handover."""
    lines = sorted(line.split() for file in folder.glob("*.marks") for line in file.read_text().splitlines())
    found: list[dict[str, float]] = []
    for text, mark in lines:
        at = float(text)
        if mark == "prefilled" and (not found or "computed" in found[-1]):
            found.append({})
        if found and "computed" not in found[-1] and (mark != "planned" or "known" in found[-1]):
            found[-1][mark] = at
    return [one for one in found if {"prefilled", *ROWS} <= one.keys()]


def rows(model: str, flags: list[str], num_prompt: int, runs: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(
            f"from pathlib import Path\nimport handover_marks\nhandover_marks.install(Path({name!r}))\n"
        )
        os.environ["PYTHONPATH"] = os.pathsep.join([name, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with serve(model, *ROLES, *flags, log=folder / "log") as server:
            asyncio.run(gaps(server, num_prompt, -1))
            of_all = [asyncio.run(gaps(server, num_prompt, seed)) for seed in range(runs)]
        found = handovers(folder)[1:]
    second, later = median(one[0] for one in of_all), median(gap for one in of_all for gap in one[2:])
    made = [(ROWS[mark], f"{1000 * median(one[mark] - one['prefilled'] for one in found):.2f} ms", "") for mark in ROWS]
    made.append(("second token later than others, as the client sees it", f"{1000 * (second - later):.2f} ms", ""))
    return [(f"{what} ({len(found)} handovers)" if not i else what, *rest) for i, (what, *rest) in enumerate(made)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("model")
    args, flags = parser.parse_known_args()
    print(table(rows(args.model, flags, args.prompt, args.runs)))


if __name__ == "__main__":
    main()
