"""What prefill and decode groups cost the scheduler: a step without transfers, and placing a request among many groups.

python tests/bench/scheduling/bench_roles.py
"""

import gc
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from rig import Row, table

from blockyard.services.scheduler.batch.worker_groups import BatchLimits
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.shared.messages import (
    Attached,
    ChoiceState,
    Generate,
    Geometry,
    KVLanded,
    KVReceive,
    KVRole,
    KVSendEnded,
    Member,
    Role,
    Sampling,
    SlotResult,
    StepPlan,
    StepResult,
    TextOptions,
)

ME, DETOKENIZER, GATEWAY, WORKER = 1, 2, 3, 4  # further workers have the next numbers
BLOCK_SIZE = 16


class Placements:
    """Groups of two roles. Each request is placed in the step in which it arrives; workers answer at once."""

    def __init__(self, num_prefill: int, num_decode: int, num_prompt: int) -> None:
        settings = SchedulerSettings(
            names=["m"], root="", batch=BatchLimits(256, 2048, 1), max_queue_len=10**6, max_queue_tokens=10**9
        )
        self.core, self.num_prompt, self.num_come = Scheduler(ME, settings, 0), num_prompt, 0
        self.received: dict[int, tuple[int, list[int]]] = {}  # worker and blocks of each transfer
        self.num_tokens: dict[tuple[int, int], int] = {}  # by worker and slot
        self.core.on_member(Member("d", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        roles = [KVRole.PREFILL] * num_prefill + [KVRole.DECODE] * num_decode
        for worker, role in enumerate(roles, WORKER):
            geometry = Geometry(8192, BLOCK_SIZE, 10**5, 32000, [2], 256, 2048, kv_role=role, kv_layout="l")
            self.core.on_member(Member("w", Role.GPU_WORKER, worker, "", ready=True), 0.0)
            self.core.step(0.0)
            self.core.on_message(worker, Attached(ME, geometry), 0.0)
        self.place_s: list[float] = []  # CPU seconds
        self._watch(self.core)

    def _watch(self, core: Scheduler) -> None:
        place: Callable = core.router.roles.place

        def timed(sequence: object) -> object:
            begun = time.thread_time()
            found = place(sequence)
            self.place_s.append(time.thread_time() - begun)
            return found

        core.router.roles.place = timed

    def come(self, max_tokens: int) -> float:
        """CPU seconds from Generate to the frames of the step. Then workers do their work."""
        i = self.num_come = self.num_come + 1
        prompt = array("I", [i % 30000, *range(self.num_prompt - 1)]).tobytes()
        frame = Generate(str(i), 0, "m", prompt, b"", Sampling(max_tokens), TextOptions(), [ChoiceState(0)])
        begun = time.thread_time()
        self.core.on_message(GATEWAY, frame, 0.0)
        sent = self.core.step(0.0)
        elapsed = time.thread_time() - begun
        while sent:
            for outgoing in sent:
                self._answer(outgoing.to, outgoing.frame)
            sent = self.core.step(0.0)
        return elapsed

    def _answer(self, worker: int, frame: object) -> None:
        if isinstance(frame, KVReceive):
            self.received[frame.transfer] = (worker, frame.blocks)
        if not isinstance(frame, StepPlan):
            return
        for start in frame.starts:
            self.num_tokens[worker, start.slot] = len(start.token_ids) // 4
        slots = []
        for run in frame.runs:
            slots.append(SlotResult(run.slot, [7], self.num_tokens[worker, run.slot]))
            self.num_tokens[worker, run.slot] += 1
        self.core.on_message(worker, StepResult(frame.number, slots, 1.0), 0.0)
        for send in frame.sends:
            if send.is_last:
                target, blocks = self.received.pop(send.transfer)
                self.core.on_message(target, KVLanded(send.transfer, blocks, [], True), 0.0)
                self.core.on_message(worker, KVSendEnded(send.transfer, True), 0.0)


def placement_row(num_prefill: int, num_decode: int, num_prompt: int, requests: int) -> Row:
    bench = Placements(num_prefill, num_decode, num_prompt)
    gc.freeze()
    gc.disable()  # as the service does
    whole = sorted(bench.come(4) for _ in range(requests))
    gc.enable()
    assert bench.core.stats().transfers_landed_total == requests, "each was handed over"
    ordered = sorted(bench.place_s)
    text = (
        f"CPU p50 {1000 * statistics.median(ordered):.3f}, p99 {1000 * ordered[int(0.99 * len(ordered))]:.3f} ms; "
        f"from Generate to plan p50 {1000 * statistics.median(whole):.3f} ms"
    )
    name = f"a prompt of {num_prompt:,} tokens is placed among {num_prefill} prefill and {num_decode} decode groups"
    return name, text, "p50 0.5 ms"


def role_rows(requests: int = 2000) -> list[Row]:
    return [placement_row(400, 600, 512, requests), placement_row(1, 1, 512, requests // 20)]


if __name__ == "__main__":
    print(table(role_rows()))
