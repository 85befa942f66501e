"""Runs packed plans on a model without KV. It has neither blocks nor sampler nor slots."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

from torch import Tensor

from blockyard.services.gpu_worker.encoders.packed_steps import PackedSteps
from blockyard.services.gpu_worker.encoders.read_packed import ReadTexts, read_packed
from blockyard.services.gpu_worker.interfaces import AdapterHost, CompletedPlan, StoredLayers
from blockyard.services.gpu_worker.kv.pool import PoolMirror
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.pooling.output import PooledResults
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.messages import Geometry, PackedVectors, Stats, StepPlan

MOST_IN_FLIGHT = 2  # steps on a GPU: one runs, one waits behind it


class NoBlocks:
    """The block hashes of a worker without KV."""

    def blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return [], b""

    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return [], b""


class _Flight:
    def __init__(self, plan: StepPlan, texts: ReadTexts, pooled: PooledResults | None, began_s: float) -> None:
        self.plan, self.texts, self.pooled, self.began_s = plan, texts, pooled, began_s
        self.launch_s = time.perf_counter() - began_s

    def is_done(self) -> bool:
        return self.pooled is None or self.pooled.done.query()


class EncoderRunner:
    """Implements `interfaces.OffloadableRunner` for a model without KV."""

    def __init__(self, model: Model, steps: PackedSteps, geometry: Geometry, mirror: PoolMirror | None = None) -> None:
        """mirror: of other ranks; None: there are none."""
        self._mirror = mirror
        self.model, self.geometry, self.block_hashes = model, geometry, NoBlocks()
        self.steps = steps
        self._flights: deque[_Flight] = deque()
        self._done_s = 0.0
        self._offloaded: OffloadedWeights | None = None
        self._runs_ahead = model.table.link.copies
        # token type 1 is ignored where there is one type
        self._has_types = geometry.pooling is not None and geometry.pooling.has_types

    adapters: AdapterHost | None = None

    @property
    def kv_memory(self) -> TransferBlocks:
        raise NotImplementedError("a model without KV has no KV transfers")

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def reset(self, num_slots: int) -> None:
        """Waits for plans in flight, and drops their results."""
        for flight in self._flights:
            if flight.pooled is not None:
                flight.pooled.done.synchronize()
        self._flights.clear()

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def can_launch(self) -> bool:
        return len(self._flights) < (MOST_IN_FLIGHT if self._runs_ahead else 1)

    def join_step(self) -> bool:
        return False  # it has no experts of others

    def idle(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Sequence[StoredLayers]:
        """Starts the step of a plan. A text that cannot run fails without the others."""
        began_s = time.perf_counter()
        assert plan.packed is not None, "a model without KV has packed plans alone"
        texts = read_packed(plan.packed, self.geometry, self._has_types)
        pooled = self.steps.run(texts.batch) if len(texts.batch.lengths) else None
        self._flights.append(_Flight(plan, texts, pooled, began_s))
        return ()

    def collect(self) -> list[CompletedPlan]:
        done = []
        while self._flights and self._flights[0].is_done():
            done.append(self._finish(self._flights.popleft()))
        return done

    def _finish(self, flight: _Flight) -> CompletedPlan:
        now = time.perf_counter()
        step_s, self._done_s = now - max(flight.began_s, self._done_s), now
        launch_s = flight.launch_s if self._runs_ahead else 0.0
        packed = flight.texts.results(flight.pooled)
        return CompletedPlan(flight.plan, [], time.time(), step_s, [], launch_s, has_prefill=True, packed=packed)

    def execute(self, plan: StepPlan) -> PackedVectors:
        """Launches a plan and waits for its results. No other plan may be in flight."""
        self.launch(plan)
        if (pooled := self._flights[0].pooled) is not None:
            pooled.done.synchronize()
        found = self.collect()[0].packed
        assert found is not None, "a packed plan has packed results"
        return found

    def sample_rows(self) -> None:
        """No row waits for the host."""

    def count(self, stats: Stats) -> Stats:
        return stats

    def release_memory(self, weights: bool = True) -> None:
        """With `weights`, moves the weights to host memory; there is no other memory."""
        if weights and self._offloaded is None:
            if self._mirror is not None:
                self._mirror.release(weights)
            if self.steps.graphs is not None:
                self.steps.graphs.drop()
            self._offloaded = OffloadedWeights(self._tensors())
        self.model.table.link.free_cached()

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        if weights and self._offloaded is not None:
            if self._mirror is not None:
                self._mirror.reclaim(weights, kv=False)
            self._offloaded.restore()
            self._offloaded = None
            if self.steps.graphs is not None:
                self.steps.graphs.capture()

    def _tensors(self) -> Iterator[Tensor]:
        return chain(tensors_of(self.model), self.steps.output.tensors())
