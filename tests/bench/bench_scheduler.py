"""What a step costs in the scheduler: one result in, one plan and one token batch out, all of them decoding.

On a machine that others use too, the CPU figures are the scheduler's own and the others are the wait for a core.

Also what a newcomer costs whose prompt of 32k tokens is in the prefix cache, with and without names of its blocks.

    python tests/bench/bench_scheduler.py [--running 256] [--steps 3000] [--profile]
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / ".src"))

import msgspec

from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.services.scheduler.groups import BatchLimits
from blockyard.shared.block_names import block_names, root_name
from blockyard.shared.messages import (
    Attached,
    Choice,
    Frame,
    Generate,
    Geometry,
    Member,
    Role,
    Sampling,
    SlotResult,
    StepPlan,
    StepResult,
    TextOptions,
)

ME, WORKER, DETOKENIZER, GATEWAY = 1, 2, 3, 4


class Bench:
    """A worker that answers each plan at once, outside the time that is taken."""

    def __init__(self, running: int, depth: int, max_tokens: int, host: bool = False) -> None:
        batch = BatchLimits(running, 16 * running, depth)
        settings = SchedulerSettings(names=["m"], root="", batch=batch, max_queue_len=10**6, max_queue_tokens=10**9)
        self.core = Scheduler(ME, settings, 0)
        self.plans: list[StepPlan] = []
        self.encode = msgspec.msgpack.Encoder().encode
        self.computed: dict[int, int] = {}
        self.core.present(Member("w", Role.GPU_WORKER, WORKER, "", ready=True), 0.0)
        self.core.present(Member("d", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        self._turn()
        num_blocks = running * (16 + max_tokens) // 16 + running + 2 * running
        geometry = Geometry(
            num_blocks, 16, 10**6, 32000, [2], running, 16 * running, num_host_blocks=host * num_blocks // 2
        )
        held = range(host * num_blocks)
        names = b"".join(block.to_bytes(16, "little") for block in held)
        self.core.handle(WORKER, Attached(WORKER, ME, geometry, list(held), names), 0.0)
        prompt = array("I", range(16)).tobytes()
        for i in range(running):
            frame = Generate(str(i), 0, "m", prompt, b"", Sampling(max_tokens), TextOptions(), [Choice(0)])
            self.core.handle(GATEWAY, frame, 0.0)
        self._turn()

    def cycle(self) -> tuple[float, float, float]:
        """Seconds in the scheduler for one result by the clock and of CPU, and seconds to encode what left."""
        plan = self.plans.pop(0)
        slots = []
        for start in plan.starts:
            self.computed[start.slot] = 0
        for run in plan.runs:
            self.computed[run.slot] += run.max_tokens
            slots.append(SlotResult(run.slot, [7], self.computed[run.slot]))
        result = StepResult(WORKER, plan.number, slots, 1.0)
        begun, cpu = time.perf_counter(), time.thread_time()
        self.core.handle(WORKER, result, 0.0)
        frames = self._turn()
        cpu = time.thread_time() - cpu
        decided = time.perf_counter()
        for frame in frames:
            self.encode(frame)
        return decided - begun, cpu, time.perf_counter() - decided

    def _turn(self) -> list[Frame]:
        frames = [outgoing.frame for outgoing in self.core.turn(0.0)]
        self.plans += [frame for frame in frames if isinstance(frame, StepPlan)]
        return frames


def measure(running: int, depth: int, steps: int, host: bool = False) -> None:
    """With `host` every block of the device holds something, and whoever needs one has that saved first."""
    bench = Bench(running, depth, steps + 100, host)
    gc.collect()
    gc.freeze()
    gc.disable()  # as the service does
    for _ in range(50):
        bench.cycle()
    times, cpu, encoding = zip(*(bench.cycle() for _ in range(steps)), strict=True)
    gc.enable()
    ordered, busy = sorted(1000 * t for t in times), sorted(1000 * t for t in cpu)
    kind = ", saving to host memory" if host else ""
    print(
        f"{running:5d} running, depth {depth}{kind}: p50 {statistics.median(ordered):.3f} ms, "
        f"p99 {ordered[int(0.99 * len(ordered))]:.3f} ms, max {ordered[-1]:.3f} ms; "
        f"CPU p50 {statistics.median(busy):.3f}, p99 {busy[int(0.99 * len(busy))]:.3f}, max {busy[-1]:.3f} ms; "
        f"encoding p50 {1000 * statistics.median(encoding):.3f} ms"
    )


def measure_lookup(num_tokens: int, rounds: int, host: bool) -> None:
    """A prompt that is found whole, seated in the turn in which it comes: all that the scheduler does for it.

    With `host` each time in host memory, because another one has taken the device since.
    """
    batch = BatchLimits(8, num_tokens, 0)
    settings = SchedulerSettings(names=["m"], root="", batch=batch, max_queue_len=9, max_queue_tokens=10**9)
    core = Scheduler(ME, settings, 0)
    core.present(Member("w", Role.GPU_WORKER, WORKER, "", ready=True), 0.0)
    core.present(Member("d", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
    core.turn(0.0)
    num_blocks = num_tokens // 16 + 1 if host else num_tokens // 8
    num_host_blocks = num_tokens // 4 if host else 0
    geometry = Geometry(num_blocks, 16, 10**6, 32000, [2], 8, num_tokens, num_host_blocks=num_host_blocks)
    core.handle(WORKER, Attached(WORKER, ME, geometry), 0.0)

    def seat(request_id: str, prompt: bytes, given: bytes) -> tuple[float, int]:
        frame = Generate(request_id, 0, "m", prompt, given, Sampling(1), TextOptions(), [Choice(0)])
        begun = time.perf_counter()
        core.handle(GATEWAY, frame, 0.0)
        frames = [outgoing.frame for outgoing in core.turn(0.0)]
        elapsed = time.perf_counter() - begun
        ((number, start),) = [(f.number, s) for f in frames if isinstance(f, StepPlan) for s in f.starts]
        core.handle(WORKER, StepResult(WORKER, number, [SlotResult(start.slot, [7], num_tokens)], 1.0), 0.0)
        core.turn(0.0)
        return 1000 * elapsed, start.num_computed

    prompts = [array("I", range(first, first + num_tokens)).tobytes() for first in (0, 7)]
    names = [block_names(root_name(""), prompt, 16) for prompt in prompts]
    for label, has_names in (("names arrive with it", True), ("names to be hashed", False)):
        times, found = [], []
        for i in range(rounds + 1):  # the first fills the cache
            if host:
                seat(f"{label} other {i}", prompts[1], names[1])
            elapsed, num_found = seat(f"{label} {i}", prompts[0], names[0] if has_names else b"")
            times.append(elapsed)
            found.append(num_found)
        assert found[-1] == num_tokens - 16, "the last block holds the last token, which is computed"
        print(
            f"prompt of {num_tokens} tokens, found{' in host memory' if host else ''}, {label}: "
            f"p50 {statistics.median(times[1:]):.3f} ms, max {max(times[1:]):.3f} ms from Generate to plan"
        )
    if host:
        assert core.stats().blocks_fetched_total > rounds * num_tokens // 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for running in args.running:
        for depth in (0, 1):
            measure(running, depth, args.steps)
    measure(256, 1, args.steps, host=True)
    for host in (False, True):
        measure_lookup(32768, 40, host)
    if args.profile:
        bench = Bench(256, 1, args.steps + 100)
        with cProfile.Profile() as profile:
            for _ in range(args.steps):
                bench.cycle()
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
