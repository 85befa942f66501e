"""Runs step plans on a model: applies a plan to the batch, computes, samples, and returns the results of each slot."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.eager import HostSteps
from blockyard.services.gpu_worker.interfaces import CompletedPlan, StoredLayers
from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.kv.pool_blocks import PoolBlocks
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.services.kv_transfer.host.host_store import BlockStore
from blockyard.shared.messages import Geometry, SlotResult, Stats, StepPlan


class RunAhead(Protocol):
    """Runs steps on a GPU ahead of the host. Implemented by `execution.device_loop.DeviceLoop`."""

    @property
    def capacity(self) -> int:
        """Sequences of a step."""

    @property
    def num_slots(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def reset(self) -> None: ...
    def can_launch(self) -> bool: ...
    def idle(self) -> bool: ...
    def apply(self, plan: StepPlan) -> None: ...
    def launch(
        self, plan: StepPlan, results: list[SlotResult], slots: Ints, counts: Ints
    ) -> Sequence[StoredLayers]: ...
    def collect(self) -> CompletedPlan | None: ...
    def sample_rows(self) -> None: ...
    def wait(self) -> CompletedPlan: ...


class Runner:
    """Runs each step from plan to results. Owns the batch, and frees and restores memory for sleep mode.

    On a GPU steps run ahead of the host.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        geometry: Geometry,
        store: BlockStore | None = None,
        move_to_device: "Callable[[Runner], None] | None" = None,
        matchers: MatcherProcesses | None = None,
    ) -> None:
        """move_to_device: called after sleep, once memory is restored. It must call `run_ahead` again.

        matchers: make the masks of structured output, None for none.
        """
        self.geometry, self.model, self.pool = geometry, model, pool
        self.batch = Batch(geometry, pool, store, matchers)
        self.host = HostSteps(model, pool, self.batch)
        self.ahead: RunAhead | None = None
        self._move_to_device = move_to_device
        self._offloaded: OffloadedWeights | None = None
        self._has_kv = True
        self._done: list[CompletedPlan] = []  # completed but not collected
        self.reset(0)

    def run_ahead(self, loop: RunAhead, step_s: float = 0.0) -> None:
        """Runs steps on `loop` from now on. Call it before the first plan. step_s: time of a decode step."""
        self.geometry = msgspec.structs.replace(self.geometry, step_s=step_s)
        self.ahead = loop
        self.reset(0)

    @property
    def block_hashes(self) -> BlockHashes:
        return self.batch.block_hashes

    @property
    def kv_memory(self) -> PoolBlocks:
        return PoolBlocks(self.pool, self.batch.block_hashes, self.batch.host_swap)

    @property
    def in_flight(self) -> int:
        return len(self._done) + (self.ahead.in_flight if self.ahead is not None else 0)

    def can_launch(self) -> bool:
        return not self._done if self.ahead is None else self.ahead.can_launch()

    def idle(self) -> bool:
        """Does one piece of background work. Returns False if no work is left."""
        if self.ahead is None or self.batch.slots.live.any():
            return self.ahead is not None
        is_left = self.ahead.idle()
        self.forget_trial_steps()
        return is_left

    def forget_trial_steps(self) -> None:
        """Keeps steps that served no request out of the loads of experts."""
        if self.model.table.expert_loads is not None:
            self.model.table.expert_loads.clear()

    def reset(self, num_slots: int) -> None:
        """Waits for steps in flight, then drops their results and all slots. Keeps KV and block hashes."""
        self._wait_for_steps()
        self._done.clear()
        self.batch.reset(num_slots if self.ahead is None else min(num_slots, self.ahead.num_slots))
        self.host.reset()
        if self.ahead is not None:
            self.ahead.reset()

    def reset_prefix_cache(self) -> None:
        self.batch.block_hashes.clear()

    def release_memory(self, weights: bool = True) -> None:
        """Frees the KV memory with its contents. With `weights`, also moves the weights to host memory."""
        self.ahead = None
        if weights and self._offloaded is None:
            self._offloaded = OffloadedWeights(tensors_of(self.model))
        self.pool.drop()
        self._has_kv = False
        self.model.table.link.free_cached()

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        if self._offloaded is None and self._has_kv:
            return
        if weights and self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        if kv and not self._has_kv:
            self.pool.restore()
            self._has_kv = True
        if self._offloaded is not None or not self._has_kv:
            return
        self.host.reset()
        if self._move_to_device is not None:
            self._move_to_device(self)

    def launch(self, plan: StepPlan) -> Sequence[StoredLayers]:
        """Applies a plan and starts its step. A slot that cannot run or sample fails without the others."""
        start = time.perf_counter()
        self.sample_rows()
        results = self.batch.apply(plan)
        slots, counts = self.batch.slots.scheduled(plan.runs)
        with torch.inference_mode():
            if self.ahead is not None:
                self.ahead.apply(plan)
                if len(slots) > (most := self.ahead.capacity):
                    results += self.batch.refuse(slots[most:], f"more than {most} sequences in a step")
                    slots, counts = slots[:most], counts[:most]
                return self.ahead.launch(plan, results, slots, counts)
            if len(slots):
                results.extend(self.host.run(slots, counts))
        self.batch.complete(plan, results)
        failed, has_prefill = self.batch.host_swap.pop_failed_fetches(plan), bool((counts > 1).any())
        step_s = time.perf_counter() - start
        self._done.append(CompletedPlan(plan, results, time.time(), step_s, failed, has_prefill=has_prefill))
        return ()

    def collect(self) -> list[CompletedPlan]:
        done, self._done = self._done, []
        while self.ahead is not None and (one := self.ahead.collect()) is not None:
            done.append(one)
        return done

    def sample_rows(self) -> None:
        """Samples rows of collected plans that wait for the host. Later plans have the results."""
        if self.ahead is not None:
            with torch.inference_mode():
                self.ahead.sample_rows()

    def count(self, stats: Stats) -> Stats:
        """Returns the worker's counters and the counters of experts and of structured output."""
        matchers, loads = self.batch.matchers, self.model.table.expert_loads
        stats = stats if loads is None else loads.count(stats)
        return stats if matchers is None else matchers.count(stats)

    def execute(self, plan: StepPlan) -> list[SlotResult]:
        """Launches a plan and waits for its results. No other plan may be in flight."""
        self.launch(plan)
        self._wait_for_steps()
        return self.collect()[0].all_results

    def _wait_for_steps(self) -> None:
        """Waits until no step is in flight."""
        while self.ahead is not None and self.ahead.in_flight:
            self._done.append(self.ahead.wait())
