"""Freezes each service for 2, 5, 7 and 12 s under load, again and again, and prints what was killed and cut.

python tests/bench/serving/bench_freezes.py [--times 20] [--seconds 2,5,7,12] [--services scheduler] [FLAGS OF SERVE]

Without flags of `serve` it is a ring of two mock workers. The launcher itself is frozen as well. A service that is
frozen for longer than --hung-timeout is killed and started again; with a gateway its own streams end. Exit code 1 if
anything else was killed, if a request had no answer, or a stream had another text.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for rig

from freezes import MOCK, NOTHING, SERVICES, Freeze, FrozenRing
from rig import percentile, serve

HUNG_TIMEOUT_S = 10.0


def rows(freezes: list[Freeze]) -> list[str]:
    """A Markdown table with one row for each service and duration."""
    lines = [
        "| frozen | s | times | killed: itself | others | answers | failed | longest pause in a stream: p50; max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds: dict[tuple[str, float], list[Freeze]] = defaultdict(list)
    for freeze in freezes:
        kinds[freeze.service, freeze.seconds].append(freeze)
    for (service, seconds), of_kind in kinds.items():
        faults = [fault for freeze in of_kind for fault in freeze.faults(HUNG_TIMEOUT_S)]
        num_others = sum(fault.endswith("was killed") for fault in faults)
        num_killed = sum(len(freeze.killed) for freeze in of_kind) - num_others
        pauses = [freeze.longest_pause_s for freeze in of_kind]
        numbers = (len(of_kind), num_killed, num_others, sum(f.answers for f in of_kind), len(faults) - num_others)
        counts = " | ".join(map(str, numbers))
        lines.append(f"| {service} | {seconds:g} | {counts} | {percentile(pauses, 0.5):.1f}; {max(pauses):.1f} s |")
    return lines


def tell(freeze: Freeze) -> None:
    for fault in freeze.faults(HUNG_TIMEOUT_S):
        print(f"{freeze.service} frozen for {freeze.seconds:g} s: {fault}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="that each service is frozen for each duration")
    parser.add_argument("--seconds", default="2,5,7,12")
    parser.add_argument("--services", default=",".join(SERVICES))
    parser.add_argument("--clients", type=int, default=16)
    args, flags = parser.parse_known_args()
    durations = [float(text) for text in args.seconds.split(",")]
    plan: list[tuple[str, float]] = [
        (name, s) for _ in range(args.times) for s in durations for name in args.services.split(",")
    ]
    plan.append((NOTHING, 2 * HUNG_TIMEOUT_S))  # for kills that come late
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with serve("demo", *(flags or MOCK), "--hung-timeout", str(HUNG_TIMEOUT_S), log=log) as server:
            freezes = asyncio.run(FrozenRing(server, args.clients).run(plan, tell))
        hung = [line for line in log.read_text("utf-8", "replace").splitlines() if "is hung" in line]
    print("\n".join(rows(freezes)))
    print(f"{time.monotonic() - began:.0f} s; {len(hung)} processes were killed as hung")
    return int(any(freeze.faults(HUNG_TIMEOUT_S) for freeze in freezes))


if __name__ == "__main__":
    sys.exit(main())
