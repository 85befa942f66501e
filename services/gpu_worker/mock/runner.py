"""A runner without a model: real plans and results, made-up tokens, at a set pace or as fast as possible."""

import time
from array import array
from collections.abc import Callable, Sequence

from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses
from blockyard.services.gpu_worker.interfaces import CompletedPlan, Report, StoredLayers
from blockyard.services.gpu_worker.mock.adapters import MockAdapters
from blockyard.services.gpu_worker.mock.batch import MockBatch, Pattern, run_packed
from blockyard.services.gpu_worker.mock.kv import MockKV
from blockyard.services.gpu_worker.mock.model import describe
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Geometry, SlotResult, Stats, StepPlan
from blockyard.shared.process.service_main import rss_bytes

MakeMemory = Callable[[MockKV, int], TransferBlocks]  # takes the blocks and their number

BEHIND_S = 0.002  # a step launched so soon after the last one ended is timed from that end


class MockRunner:
    """Runs each plan before `launch` returns."""

    def __init__(
        self,
        geometry: Geometry,
        pattern: Pattern,
        step_s: float,
        fatal_id: int = 0,
        make_memory: MakeMemory | None = None,
    ) -> None:
        """make_memory: for KV transfers; None: there are none."""
        self.geometry, self.block_hashes = geometry, MockKV(geometry.block_size)
        self.adapters = MockAdapters() if geometry.num_adapter_places or geometry.num_prompt_adapters else None
        self._memory = None if make_memory is None else make_memory(self.block_hashes, geometry.num_blocks)
        self._fatal_id = fatal_id
        self._pattern, self._step_s = pattern, step_s
        self._batch = MockBatch(geometry, 0, pattern, self.block_hashes)
        self._done_at = 0.0
        self._done: list[CompletedPlan] = []  # not collected yet

    @property
    def kv_memory(self) -> TransferBlocks:
        assert self._memory is not None, "the worker has no KV transfers"
        return self._memory

    @property
    def in_flight(self) -> int:
        return len(self._done)

    def can_launch(self) -> bool:
        return not self._done

    def join_step(self) -> bool:
        return False  # it has no experts of others

    def idle(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Sequence[StoredLayers]:
        start = time.perf_counter()
        results = self.execute(plan)
        step_s, has_prefill = time.perf_counter() - start, any(run.max_tokens > 1 for run in plan.runs)
        failed = self._batch.failed
        packed = None if plan.packed is None else run_packed(self.geometry, plan.packed)
        self._done.append(
            CompletedPlan(plan, results, time.time(), step_s, failed, has_prefill=has_prefill, packed=packed)
        )
        return ()

    def collect(self) -> list[CompletedPlan]:
        done, self._done = self._done, []
        return done

    def sample_rows(self) -> None:
        """No row waits for the host."""

    def count(self, stats: Stats) -> Stats:
        return stats

    def reset(self, num_slots: int) -> None:
        self._done.clear()
        self._batch = MockBatch(self.geometry, num_slots, self._pattern, self.block_hashes)

    def reset_prefix_cache(self) -> None:
        self.block_hashes.clear()

    def release_memory(self, weights: bool = True) -> None:
        """Only blocks for KV transfers are in memory."""
        if self._memory is not None:
            self._memory.arena.drop()

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        if self._memory is not None and kv:
            self._memory.arena.restore()

    def execute(self, plan: StepPlan) -> list[SlotResult]:
        """Takes `step_s`. Raises PlanError for a plan that contradicts earlier ones, RuntimeError for a prompt with
        `fatal_id`: the process then ends."""
        prompts = [start.token_ids for start in plan.starts] if plan.packed is None else [plan.packed.token_ids]
        if self._fatal_id and any(self._fatal_id in array("I", ids) for ids in prompts):
            raise RuntimeError(f"the mock's device fails on id {self._fatal_id}")
        if self.adapters is not None:
            self.adapters.place(plan.adapters)
            self.adapters.start(plan.starts)
        results = self._batch.step(plan)
        self.block_hashes.add(plan.full_blocks)
        if self._step_s:
            now = time.monotonic()
            start = self._done_at if now - self._done_at < BEHIND_S else now
            self._done_at = start + self._step_s
            time.sleep(max(0.0, self._done_at - now))
        return results


def held_bytes(config: WorkerConfig) -> int:
    return rss_bytes()


def start(
    config: WorkerConfig,
    report: Report,
    processes: CompileProcesses | None = None,
    make_memory: MakeMemory | None = None,
) -> MockRunner:
    """Raises LoadError if the model's config.json does not decode. processes: unused. make_memory: see `MockRunner`."""
    geometry, pattern = describe(config)
    pace = f"{config.mock.step_ms} ms a step" if config.mock.step_ms else "as fast as it can"
    note = f"mock worker: no weights, {geometry.num_blocks} KV blocks of {geometry.block_size} tokens, {pace}"
    report("ready", 1.0, [note])
    return MockRunner(geometry, pattern, config.mock.step_ms / 1000, config.mock.fatal_id, make_memory)
