"""Runs step plans on a model: applies a plan to the batch, computes, samples, and returns the results of each slot."""

from collections.abc import Callable, Sequence

import msgspec
import torch

from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.device_loop import DeviceLoop, DeviceSteps
from blockyard.services.gpu_worker.execution.ranks.expert_balancer import ExpertBalancer
from blockyard.services.gpu_worker.execution.replica_steps import ReplicaSteps
from blockyard.services.gpu_worker.interfaces import CompletedPlan, StoredLayers
from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.kv.pool_blocks import PoolBlocks
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.parallel.replicas import StepAgreement
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.services.gpu_worker.prompt_adapters.adapter_hosts import AdapterHosts
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.services.kv_transfer.host.host_store import BlockStore
from blockyard.shared.config.services.worker import LogprobsMode
from blockyard.shared.messages import Geometry, SlotResult, Stats, StepPlan


class Runner:
    """Runs each step from plan to results. Owns the batch, and frees and restores memory for sleep mode."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        geometry: Geometry,
        store: BlockStore | None,
        start_steps: "Callable[[Runner], None]",
        matchers: MatcherProcesses | None = None,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        adapters: AdapterHosts | None = None,
        send: SendCommand | None = None,
        balancer: ExpertBalancer | None = None,
    ) -> None:
        """start_steps: called after sleep, once memory is restored. It must call `use`, as must the caller before the
        first plan.

        matchers: make the masks of structured output, None for none. logprobs_mode: of output tokens; with others than
        `RAW_LOGPROBS` the steps must leave log-probabilities to the host. adapters: of the model; None: it serves none.
        send: to the other ranks; None: there is one. balancer: of experts; None: they stay where they are.
        """
        self.geometry, self.model, self.pool = geometry, model, pool
        self.adapters, self.send, self._balancer = adapters, send, balancer
        self._agreement: StepAgreement | None = None
        self._replica_steps: ReplicaSteps | None = None
        self.batch = Batch(geometry, pool, store, matchers, None if adapters is None else adapters.prompts)
        self._depends: Callable[[StepPlan], bool] | None = None
        self._loop: DeviceLoop | None = None  # None: asleep, or not on its device yet
        self._start_steps, self._logprobs_mode = start_steps, logprobs_mode
        self._offloaded: OffloadedWeights | None = None
        self._has_kv = True
        self._has_chores = True  # there may be background work
        self._done: list[CompletedPlan] = []  # completed but not collected

    def share_experts(self, agreement: StepAgreement) -> None:
        """Other replicas have the experts together with this one. Call it before `use`."""
        self._agreement = agreement

    def use(self, steps: DeviceSteps, step_s: float = 0.0, depends: Callable[[StepPlan], bool] | None = None) -> None:
        """Runs steps on `steps` from now on. Call it before the first plan. step_s: time of a decode step.

        depends: whether a plan may be applied only once the oldest step in flight is done; None: each may.
        """
        self._depends, self._has_chores = depends, True
        if self._agreement is not None and (exchange := self.model.table.exchange) is not None:
            steps = self._replica_steps = ReplicaSteps(steps, exchange, self._agreement, self.send, self._balancer)
        self.geometry = msgspec.structs.replace(self.geometry, step_s=step_s)
        self._loop = DeviceLoop(steps, self.batch, self.geometry, self._logprobs_mode, self.model.table.link)
        self.reset(0)

    @property
    def loop(self) -> DeviceLoop:
        assert self._loop is not None, "the runner is asleep"
        return self._loop

    @property
    def block_hashes(self) -> BlockHashes:
        return self.batch.block_hashes

    @property
    def kv_memory(self) -> PoolBlocks:
        return PoolBlocks(self.pool, self.batch.block_hashes, self.batch.host_swap)

    @property
    def in_flight(self) -> int:
        return len(self._done) + (self._loop.in_flight if self._loop is not None else 0)

    def can_launch(self) -> bool:
        return self.loop.can_launch()

    def join_step(self) -> bool:
        """A step of padding has buffers that no step in flight may have."""
        if self._loop is None or self._loop.in_flight or self._replica_steps is None:
            return False
        return self._replica_steps.join()

    def idle(self) -> bool:
        """Does one piece of background work. Returns False if no work is left."""
        if self._loop is None or not self._loop.steps.runs_ahead:
            return False  # the CPU has no background work
        if self.batch.slots.live.any():
            return True
        is_left, was_left = self._loop.steps.idle(), self._has_chores
        self._has_chores = is_left
        if is_left or was_left:  # otherwise nothing was done
            self.forget_trial_steps()
        return is_left

    def forget_trial_steps(self) -> None:
        """Keeps steps that served no request out of the loads of experts."""
        if self.model.table.expert_loads is not None:
            self.model.table.expert_loads.clear()
        if self._balancer is not None and self._replica_steps is None:  # replicas count steps together
            self._balancer.restart()

    def reset(self, num_slots: int) -> None:
        """Waits for steps in flight, then drops their results and all slots. Keeps KV and block hashes."""
        self._wait_for_steps()
        self._done.clear()
        self.batch.reset(num_slots if self._loop is None else min(num_slots, self._loop.num_slots))
        if self._loop is not None:
            self._loop.reset()

    def reset_prefix_cache(self) -> None:
        self.batch.block_hashes.clear()

    def release_memory(self, weights: bool = True) -> None:
        """Frees the KV memory with its contents. With `weights`, also moves the weights to host memory."""
        self._loop = None
        if self.pool.mirror is not None:
            self.pool.mirror.release(weights)
        if weights and self._offloaded is None:
            self._offloaded = OffloadedWeights(tensors_of(self.model))
        self.pool.drop()
        self._has_kv = False
        self.model.table.link.free_cached()

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        if self._offloaded is None and self._has_kv:
            return
        if self.pool.mirror is not None:
            self.pool.mirror.reclaim(weights, kv and not self._has_kv)
        if weights and self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        if kv and not self._has_kv:
            self.pool.restore()
            self._has_kv = True
        if self._offloaded is not None or not self._has_kv:
            return
        self._start_steps(self)

    def launch(self, plan: StepPlan) -> Sequence[StoredLayers]:
        """Applies a plan and starts its step. A slot that cannot run or sample fails without the others."""
        while self._depends is not None and self._depends(plan):
            self._done.append(self.loop.wait())
        if self._balancer is not None:
            if self._balancer.is_due:
                self._wait_for_steps()
            if self._replica_steps is None:
                self._balancer.begin_step()
        self.sample_rows()
        if plan.adapters and self.adapters is not None:
            self.adapters.place(plan.adapters)
        results = self.batch.apply(plan)
        rows = self.batch.slots.scheduled(plan.runs)
        with torch.inference_mode():
            self.loop.apply(plan)
            if len(rows) > (most := self.loop.steps.capacity):
                results += self.batch.refuse(rows.slots[most:], f"more than {most} sequences in a step")
                rows = rows.cut(most)
            return self.loop.launch(plan, results, rows)

    def collect(self) -> list[CompletedPlan]:
        done, self._done = self._done, []
        while self._loop is not None and (one := self._loop.collect()) is not None:
            done.append(one)
        return done

    def sample_rows(self) -> None:
        """Samples rows of collected plans that wait for the host. Later plans have the results."""
        if self._loop is not None:
            self._loop.sample_rows()

    def count(self, stats: Stats) -> Stats:
        """Returns the worker's counters and the counters of experts and of structured output."""
        matchers, loads = self.batch.matchers, self.model.table.expert_loads
        stats = stats if loads is None else loads.count(stats)
        stats = stats if self._balancer is None else self._balancer.count(stats)
        return stats if matchers is None else matchers.count(stats)

    def execute(self, plan: StepPlan) -> list[SlotResult]:
        """Launches a plan and waits for its results. No other plan may be in flight."""
        self.launch(plan)
        self._wait_for_steps()
        return self.collect()[0].all_results

    def _wait_for_steps(self) -> None:
        while self._loop is not None and self._loop.in_flight:
            self._done.append(self._loop.wait())
