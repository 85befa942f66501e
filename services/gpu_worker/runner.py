"""Runs step plans on a model: applies what changed, computes, samples, says what each slot produced."""

import time

import torch

from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.block_names import BlockNames
from blockyard.services.gpu_worker.host_steps import DecodeSteps, HostSteps
from blockyard.services.gpu_worker.interfaces import Done
from blockyard.services.gpu_worker.kv_pool import KVPool
from blockyard.services.gpu_worker.lockstep import Lockstep
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.services.kv_transfer.host_store import BlockStore
from blockyard.shared.messages import Geometry, SlotResult, StepPlan


class Runner:
    """The state of one worker's batch and the loop body over it."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        geometry: Geometry,
        decode_steps: DecodeSteps | None = None,
        store: BlockStore | None = None,
    ) -> None:
        self.geometry, self.model, self.pool = geometry, model, pool
        self._batch = Batch(geometry, pool, store)
        self.host = HostSteps(model, pool, self._batch, decode_steps)
        self._lockstep = Lockstep(self._run, self._batch.transfers.take_failed)
        self.reset(0)

    @property
    def names(self) -> BlockNames:
        return self._batch.names

    @property
    def in_flight(self) -> int:
        return len(self._lockstep)

    def can_launch(self) -> bool:
        return not self._lockstep

    def reset(self, num_slots: int) -> None:
        """Drops all slots; KV and its names stay."""
        self._lockstep.collect()
        self._batch.reset(num_slots)
        self.host.forget()

    def launch(self, plan: StepPlan) -> None:
        """A slot that cannot run or sample fails alone."""
        self._lockstep.launch(plan)

    def collect(self) -> list[Done]:
        return self._lockstep.collect()

    def execute(self, plan: StepPlan) -> list[SlotResult]:
        """Launches a plan and waits for it, where nothing else is in flight."""
        self.launch(plan)
        while not (done := self.collect()):
            time.sleep(0)
        return done[0].slots

    def _run(self, plan: StepPlan) -> list[SlotResult]:
        results = self._batch.apply(plan)
        slots, counts = self._batch.slots.grant(plan.runs)
        if len(slots):
            with torch.inference_mode():
                results.extend(self.host.run(slots, counts))
        self._batch.settle(plan, results)
        return results
