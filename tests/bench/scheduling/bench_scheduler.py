"""The scheduling table as measured on this machine; each row with its bar.

A step is one result in, one plan and one token batch out, all of them decoding; a lookup is a new
request with a prompt of 32k tokens that is in the prefix cache. On a shared
machine the CPU figures are the scheduler's own, and the others include the wait for a core.

    python tests/bench/scheduling/bench_scheduler.py [--running 256 1024] [--steps 3000] [--quick] [--profile]
"""

import argparse
import contextlib
import cProfile
import gc
import os
import platform
import pstats
import statistics
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

import msgspec
from rig import Row, table
from scheduling.bench_equality import equality_rows
from scheduling.bench_roles import DETOKENIZER, GATEWAY, ME, WORKER, role_rows
from scheduling.bench_simulator import simulator_rows
from serving.bench_prefix import prefix_rows

from blockyard.services.scheduler.batch.worker_groups import BatchLimits
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.shared.block_hashes import block_hashes, root_hash
from blockyard.shared.config.services.lora import AdapterSettings, AdapterSource
from blockyard.shared.messages import (
    NO_TOKEN,
    AdapterLoaded,
    Attached,
    ChoiceState,
    FinishReason,
    Frame,
    Generate,
    Geometry,
    KVRole,
    LoadAdapter,
    Member,
    Role,
    Sampling,
    SlotResult,
    StepPlan,
    StepResult,
    TextOptions,
    TokenLogprobs,
    encode_logprobs,
)

DIGEST = bytes(16)  # of every adapter


class Bench:
    """Workers that answer each plan at once, outside the measured time."""

    def __init__(
        self,
        running: int,
        depth: int,
        max_tokens: int,
        num_groups: int = 1,
        policy: str = "fcfs",
        waiting: int = 0,
        host: bool = False,
        churn: int = 0,
        roles: bool = False,
        logprobs: int | None = None,
        *,
        adapters: int = 0,
    ) -> None:
        """With `roles` the groups only decode, and one more group, which is idle, would compute longer prompts.

        With `logprobs` every token comes with so many likeliest tokens.

        With `host` every block of the device is cached, and is saved to host memory before it is used again.

        With `adapters` each request names one of so many, in turn, and a worker has a place for each.

        With `churn` choices have 1 to 2 times so many tokens, and whenever one ends another comes.
        """
        batch = BatchLimits(running, 16 * running, depth)
        settings = SchedulerSettings(
            names=["m"],
            root="",
            batch=batch,
            max_queue_len=10**6,
            max_queue_tokens=10**9,
            policy=policy,
            adapters=AdapterSettings(sources=[AdapterSource(name=f"a{i}", path=f"/{i}") for i in range(adapters)]),
        )
        self.core = Scheduler(ME, settings, 0)
        self.plans: list[tuple[int, StepPlan]] = []  # with the worker that it is for
        self.encode = msgspec.msgpack.Encoder().encode
        self.core.on_member(Member("d", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        num_blocks = running * (16 + max_tokens) // 16 + running + 2 * running
        held = list(range(host * num_blocks))
        names = b"".join(block.to_bytes(16, "little") for block in held)
        geometry = Geometry(
            *(num_blocks, 16, 10**6, 32000, [2], running, 16 * running),
            num_host_blocks=len(held) // 2,
            num_adapter_places=adapters,
            num_host_adapters=adapters,
        )
        kinds = [KVRole.DECODE if roles else KVRole.BOTH] * num_groups + [KVRole.PREFILL] * roles
        for worker, role in enumerate(kinds, WORKER):
            self.core.on_member(Member("w", Role.GPU_WORKER, worker, "", ready=True), 0.0)
            self._turn()
            there = msgspec.structs.replace(geometry, kv_role=role, kv_layout="layout")
            self.core.on_message(worker, Attached(ME, there, held, names), 0.0)
        self.max_tokens, self.churn, self.num_come, self.logprobs = max_tokens, churn, 0, logprobs
        top = logprobs or 0
        self.scores = TokenLogprobs(7, -0.5, 1, [7] * top, [-0.5] * top)
        self.adapters = adapters
        while asked := [frame for frame in self._turn() if isinstance(frame, LoadAdapter)]:
            for frame in asked:
                self.core.on_message(WORKER, AdapterLoaded(frame.adapter, DIGEST), 0.0)
        self.said: dict[tuple[int, int], tuple[int, int]] = {}  # tokens of a worker's slot, and how many it will say
        for _ in range(running * num_groups + waiting):
            self._come()
        self._turn()

    def cycle(self) -> tuple[float, float, float]:
        """For one result: seconds in the scheduler by the clock, CPU seconds, and seconds to encode the frames sent."""
        worker, plan = self.plans.pop(0)
        result = self._result(worker, plan)
        for slot in result.slots:
            if slot.finish is not None:
                self._come()
        begun, cpu = time.perf_counter(), time.thread_time()
        self.core.on_message(worker, result, 0.0)
        frames = self._turn()
        cpu = time.thread_time() - cpu
        decided = time.perf_counter()
        for frame in frames:
            self.encode(frame)
        return decided - begun, cpu, time.perf_counter() - decided

    def _come(self) -> None:
        """Another request, of 8 keys with 4 users each."""
        i = self.num_come = self.num_come + 1
        prompt, choices = array("I", [i] * 16).tobytes(), [ChoiceState(0)]
        max_tokens = self.churn + i * 7919 % self.churn if self.churn else self.max_tokens
        frame = Generate(
            str(i),
            0,
            "m",
            prompt,
            b"",
            Sampling(max_tokens, num_logprobs=self.logprobs),
            TextOptions(),
            choices,
            priority=i // 50,
            tenant=f"key-{i % 8}",
            user=f"user-{i % 32}",
            adapter=f"a{i % self.adapters}" if self.adapters else "",
            adapter_digest=DIGEST if self.adapters else b"",
        )
        self.core.on_message(GATEWAY, frame, 0.0)

    def _result(self, worker: int, plan: StepPlan) -> StepResult:
        slots, token_ids = [], array("I")
        for start in plan.starts:
            self.said[worker, start.slot] = (0, start.sampling.max_tokens)
        for run in plan.runs:
            num_said, most = self.said[worker, run.slot]
            self.said[worker, run.slot] = (num_said + 1, most)
            plain = run.max_tokens == 1 and num_said + 1 < most
            token_ids.append(7 if plain else NO_TOKEN)
            if not plain and num_said < most:
                finish = FinishReason.LENGTH if num_said + 1 == most else None
                scores = [] if self.logprobs is None else [self.scores]
                slots.append(SlotResult(run.slot, [7], 16 + num_said, finish, logprobs=scores))
        encoded = [] if self.logprobs is None else [encode_logprobs(self.scores)] * len(plan.runs)
        return StepResult(plan.number, slots, 1.0, token_ids=token_ids.tobytes(), logprobs=encoded)

    def _turn(self) -> list[Frame]:
        sent = self.core.step(0.0)
        self.plans += [(outgoing.to, outgoing.frame) for outgoing in sent if isinstance(outgoing.frame, StepPlan)]
        return [outgoing.frame for outgoing in sent]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """The collector is off in the service, too."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def measure(running: int, depth: int, steps: int, num_groups: int = 1, **more: Any) -> str:
    bench = Bench(running, depth, steps + 200, num_groups, **more)
    with collector_off():
        for _ in range(50 * num_groups):
            bench.cycle()
        rows = [bench.cycle() for _ in range(steps)]
    assert sum(len(group.running) for group in bench.core.groups.values()) == running * num_groups
    return f"{_spread([row[0] for row in rows])}; CPU {_spread([row[1] for row in rows])}"


def _spread(seconds: list[float]) -> str:
    ordered = sorted(1000 * s for s in seconds)
    return (
        f"p50 {statistics.median(ordered):.3f}, p99 {ordered[int(0.99 * len(ordered))]:.3f}, max {ordered[-1]:.3f} ms"
    )


def adapter_ratio(running: int, steps: int, adapters: int, **more: Any) -> str:
    """Steps in which each sequence has one of so many adapters, in turn with steps of another scheduler without."""
    benches = [Bench(running, 1, steps + 200, adapters=number, **more) for number in (0, adapters)]
    with collector_off():
        rows = [[bench.cycle()[1] for bench in benches] for _ in range(steps + 50)][50:]
    assert all(sum(map(len, (g.running for g in bench.core.groups.values()))) == running for bench in benches)
    without, having = (statistics.median(row[i] for row in rows) for i in (0, 1))
    return f"CPU p50 {1000 * having:.3f} ms, {having / without:.2f} times that without"


class Lookups:
    """Prompts that start in the step in which they arrive: all that the scheduler does for them."""

    def __init__(self, num_tokens: int, num_blocks: int, num_host_blocks: int) -> None:
        self.num_tokens = num_tokens
        batch = BatchLimits(8, num_tokens, 0)
        settings = SchedulerSettings(names=["m"], root="", batch=batch, max_queue_len=9, max_queue_tokens=10**9)
        self.core = core = Scheduler(ME, settings, 0)
        core.on_member(Member("w", Role.GPU_WORKER, WORKER, "", ready=True), 0.0)
        core.on_member(Member("d", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        core.step(0.0)
        geometry = Geometry(num_blocks, 16, 10**6, 32000, [2], 8, num_tokens, num_host_blocks=num_host_blocks)
        core.on_message(WORKER, Attached(ME, geometry), 0.0)

    def start(self, request_id: str, prompt: bytes, names: bytes) -> tuple[float, int]:
        """Milliseconds from Generate to plan, and tokens found."""
        core = self.core
        frame = Generate(request_id, 0, "m", prompt, names, Sampling(1), TextOptions(), [ChoiceState(0)])
        begun = time.perf_counter()
        core.on_message(GATEWAY, frame, 0.0)
        frames = [outgoing.frame for outgoing in core.step(0.0)]
        elapsed = time.perf_counter() - begun
        ((number, start),) = [(f.number, s) for f in frames if isinstance(f, StepPlan) for s in f.starts]
        result = StepResult(number, [SlotResult(start.slot, [7], self.num_tokens)], 1.0)
        core.on_message(WORKER, result, 0.0)
        core.step(0.0)
        return 1000 * elapsed, start.num_computed


def lookup_rows(num_tokens: int, rounds: int, host: bool = False) -> list[Row]:
    """With `host` all of it is in host memory each time, because another prompt has taken the device since."""
    rows: list[Row] = []
    lookups = Lookups(num_tokens, num_tokens // (16 if host else 8) + host, host * num_tokens // 4)
    prompts = [array("I", range(first, first + num_tokens)).tobytes() for first in (0, 7)]
    names = [block_hashes(root_hash(""), prompt, 16) for prompt in prompts]
    for label, given in (("names arrive with it", names[0]), ("names to be hashed", b"")):
        times, found = [], []
        with collector_off():
            for i in range(rounds + 1):  # the first fills the cache
                if host:
                    lookups.start(f"other {label} {i}", prompts[1], names[1])
                elapsed, num_cached_blocks = lookups.start(f"{label} {i}", prompts[0], given)
                times.append(elapsed)
                found.append(num_cached_blocks)
        assert found[-1] == num_tokens - 16, "the last block holds the last token, which is computed"
        text = f"p50 {statistics.median(times[1:]):.3f}, max {max(times[1:]):.3f} ms from Generate to plan"
        where = "found in host memory, as many saved" if host else "found"
        rows.append((f"prompt of {num_tokens:,} tokens, {where}, {label}", text, "1 ms" if given else "3 ms"))
    return rows


def schedule_rows(running: list[int], steps: int) -> list[Row]:
    rows: list[Row] = []
    bars = {256: "p50 0.25, p99 1 ms", 1024: "p50 1, p99 3 ms"}
    for num in running:
        rows.append((f"a step's schedule, {num} running, one plan ahead", measure(num, 1, steps), bars.get(num, "")))
        text = measure(num, 1, steps, logprobs=5)
        rows.append(("the same, each token with 5 log-probabilities", text, "p50 twice the plain one"))
    rows.append(("the same, lockstep, 256 running", measure(256, 0, steps), bars[256]))
    text = measure(256, 1, steps, roles=True)
    rows.append(("the same, 256 running in a decode group beside an idle prefill group", text, bars[256]))
    rows.append(("the same, each of 8 groups with 256 running", measure(256, 1, steps, 8), bars[256]))
    text = measure(256, 1, steps, churn=200)
    rows.append(("the same, 256 running, one ends and another comes in nearly every step", text, bars[256]))
    for more, what in (({}, ""), ({"churn": 200}, ", one ends and another comes in nearly every step")):
        text = adapter_ratio(256, steps, 64, **more)
        rows.append((f"the same, 256 running with 64 adapters{what}", text, "1.1 times"))
    rows.append(("the same, what blocks hold is saved to host memory", measure(256, 1, steps, host=True), bars[256]))
    for policy in ("priority", "fair"):
        text = measure(256, 1, steps, policy=policy, waiting=500)
        rows.append((f"the same, 256 running, 500 waiting, {policy}", text, bars[256]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="without what starts servers")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.profile:
        bench = Bench(256, 1, args.steps + 100)
        with cProfile.Profile() as profile:
            for _ in range(args.steps):
                bench.cycle()
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    load = os.getloadavg()[0]
    rows = [*schedule_rows(args.running, args.steps), *lookup_rows(32768, 40), *lookup_rows(32768, 40, host=True)]
    rows += [*role_rows(), *simulator_rows()]
    if not args.quick:
        rows += [*prefix_rows(), *equality_rows()]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, load {load:.1f}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
