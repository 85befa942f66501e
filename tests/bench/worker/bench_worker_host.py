"""Cost of steps for the worker's thread around the device: plan in, slots granted, results out, answer; new requests.

No device takes part: its results stand in memory. CPU time, medians.
`python tests/bench/worker/bench_worker_host.py [rows]`
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

import msgspec
import numpy as np
import torch
from rig import Row, median, table

from blockyard.kernels.slots.slot_state import NUM_RESULTS, SlotOutcome, SlotState
from blockyard.services.gpu_worker.execution.device_loop import DeviceLoop, InFlightStep, LaunchedStep
from blockyard.services.gpu_worker.execution.device_slots import DeviceSlots
from blockyard.services.gpu_worker.host_link import CompletedEvent, SameMemory
from blockyard.services.gpu_worker.service import packed
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import Sampling, SlotRun, SlotStart, StepPlan, StepResult, WorkerIn

ROUNDS = 100


def ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return 1000 * median(times)


def measure(rows: int) -> Row:
    slots = Slots(rows + 128, 8192, 16, 151936, 4 * rows)
    prompt = np.arange(32, dtype="<u4").tobytes()
    for slot in range(rows):
        assert slots.start(SlotStart(slot, prompt, 32, 0, list(range(4 * slot, 4 * slot + 4)), Sampling(256), 0))
    results = np.zeros((NUM_RESULTS, rows), np.int32)
    results[0], results[1], results[2] = SlotOutcome.TOKEN, np.random.default_rng(0).integers(0, 151936, rows), 33
    swap = SimpleNamespace(pop_failed_fetches=lambda plan: [])
    batch: Any = SimpleNamespace(slots=slots, complete=lambda plan, done: None, host_swap=swap)
    loop = DeviceLoop.__new__(DeviceLoop)
    loop._batch, loop._done_s = batch, 0.0
    loop._host_sampling = SimpleNamespace(take_results=lambda plan, done: [])
    plan = StepPlan(1, 1, [], [], [], [SlotRun(slot, 1) for slot in range(rows)])
    outcomes, tokens, computed = results
    launched = LaunchedStep((outcomes, tokens, computed), CompletedEvent())
    everyone = np.arange(rows)

    def finish() -> StepResult:
        done = loop._finish(
            InFlightStep(plan, [], everyone, slots.owners[everyone], launched, 0.0, 0.0, {}, rows, [], None)
        )
        others, token_ids, logprobs = packed(done)
        return StepResult(1, others, done.stamp_s, token_ids=token_ids, logprobs=logprobs)

    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(WorkerIn).decode
    answer, data = finish(), encode(plan)
    parts = {
        "plan decoded": ms(lambda: decode(data)),
        "slots granted": ms(lambda: slots.scheduled(plan.runs)),
        "results read": ms(finish),
        "answer encoded": ms(lambda: encode(answer)),
    }
    text = ", ".join(f"{what} {cost:.2f}" for what, cost in parts.items())
    return (f"{rows:,} rows, ms a step", f"{text}: {sum(parts.values()):.2f}", "")


def starts(num: int) -> Row:
    """Requests that begin in one step: the host's slots, and what the device gets to know."""
    slots, device = Slots(1152, 8192, 16, 151936, 4096), torch.device("cpu")
    on_device = DeviceSlots(
        SlotState.make(2048, 1024, 512, device), 2048, 151936, [151645], SameMemory(), logits_edits=True
    )
    prompt, asked = np.arange(32, dtype="<u4").tobytes(), Sampling(256, temperature=0.0, ignore_eos=True)
    all_of_them = [SlotStart(i, prompt, 32, 0, [3 * i, 3 * i + 1, 3 * i + 2], asked, 0) for i in range(num)]
    plan = StepPlan(1, 1, [], all_of_them, [], [SlotRun(i, 32) for i in range(num)])

    def note() -> None:
        on_device.apply(plan, slots)
        on_device.take()

    parts = {
        "slots": ms(lambda: [slots.start(one) for one in all_of_them]),
        "device": ms(note),
    }
    text = ", ".join(f"{what} {cost:.2f}" for what, cost in parts.items())
    return (f"{num} requests begin, ms", f"{text}: {sum(parts.values()):.2f}", "")


if __name__ == "__main__":
    print(table([*(measure(rows) for rows in map(int, sys.argv[1:] or ("252", "1020"))), starts(64)]))
