"""Runs plans on a model without KV: each slot is a sequence that one step computes whole. It has neither blocks nor
sampler nor state of slots on the device."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from blockyard.services.gpu_worker.encoders.packed_steps import PackedSteps, PackedText
from blockyard.services.gpu_worker.interfaces import AdapterHost, CompletedPlan, StoredLayers
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.pooling.output import PooledResults, options_of
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.messages import FinishReason, Geometry, SlotResult, SlotStart, Stats, StepPlan

MOST_IN_FLIGHT = 2  # steps on a GPU: one runs, one waits behind it


class NoBlocks:
    """The block hashes of a worker without KV."""

    def blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return [], b""

    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return [], b""


class _Flight:
    """A plan that is launched and not collected."""

    def __init__(self, plan: StepPlan, failed: list[SlotResult], pooled: PooledResults | None, lengths: dict[int, int],
                 began_s: float) -> None:  # fmt: skip
        self.plan, self.failed, self.pooled, self.lengths, self.began_s = plan, failed, pooled, lengths, began_s
        self.launch_s = time.perf_counter() - began_s

    def is_done(self) -> bool:
        return self.pooled is None or self.pooled.done.query()

    def results(self) -> list[SlotResult]:
        if self.pooled is None:
            return self.failed
        return [*self.failed, *self.pooled.to_slot_results(self.lengths)]


class EncoderRunner:
    """Implements `interfaces.OffloadableRunner` for a model without KV."""

    def __init__(self, model: Model, steps: PackedSteps, geometry: Geometry) -> None:
        self.model, self.geometry, self.block_hashes = model, geometry, NoBlocks()
        self._steps = steps
        self._texts: dict[int, PackedText | str] = {}  # by slot; a text that cannot run: why
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
        """Waits for plans in flight, and drops their results and all slots."""
        for flight in self._flights:
            if flight.pooled is not None:
                flight.pooled.done.synchronize()
        self._flights.clear()
        self._texts.clear()

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def can_launch(self) -> bool:
        return len(self._flights) < (MOST_IN_FLIGHT if self._runs_ahead else 1)

    def idle(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Sequence[StoredLayers]:
        """Starts the step of a plan. A sequence that cannot run fails without the others."""
        began_s = time.perf_counter()
        for slot in plan.ends:
            self._texts.pop(slot, None)
        for start in plan.starts:
            self._texts[start.slot] = self._read(start)
        texts: list[PackedText] = []
        failed: list[SlotResult] = []
        for run in plan.runs:
            text = self._texts.pop(run.slot, None)  # it runs once
            if isinstance(text, str):
                failed.append(SlotResult(run.slot, [], 0, FinishReason.FAILED, detail=text))
            elif text is not None:
                texts.append(text)
        pooled = self._steps.run(texts) if texts else None
        lengths = {text.slot: len(text.token_ids) for text in texts}
        self._flights.append(_Flight(plan, failed, pooled, lengths, began_s))
        return ()

    def _read(self, start: SlotStart) -> PackedText | str:
        ids = np.frombuffer(start.token_ids, "<u4").astype(np.int64)
        most, vocab_size = self.geometry.max_model_len, self.geometry.vocab_size
        if not 0 < len(ids) <= most:
            return f"{len(ids)} tokens do not fit a length of {most}"
        if int(ids.max()) >= vocab_size:
            return f"token id {ids.max()} is outside of the vocabulary of {vocab_size}"
        if start.pooled is None:
            return PackedText(slot=start.slot, token_ids=ids)
        pooled, second = start.pooled, start.pooled.second_start
        return PackedText(
            slot=start.slot,
            token_ids=ids,
            second_start=second if self._has_types else None,
            skip=pooled.skip,
            options=options_of(pooled.params),
        )

    def collect(self) -> list[CompletedPlan]:
        done = []
        while self._flights and self._flights[0].is_done():
            done.append(self._finish(self._flights.popleft()))
        return done

    def _finish(self, flight: _Flight) -> CompletedPlan:
        now = time.perf_counter()
        step_s, self._done_s = now - max(flight.began_s, self._done_s), now
        launch_s = flight.launch_s if self._runs_ahead else 0.0
        results = flight.results()
        return CompletedPlan(flight.plan, results, time.time(), step_s, [], launch_s, has_prefill=True)

    def execute(self, plan: StepPlan) -> list[SlotResult]:
        """Launches a plan and waits for its results. No other plan may be in flight."""
        self.launch(plan)
        if (pooled := self._flights[0].pooled) is not None:
            pooled.done.synchronize()
        return self.collect()[0].all_results

    def sample_rows(self) -> None:
        """No row waits for the host."""

    def count(self, stats: Stats) -> Stats:
        return stats

    def release_memory(self, weights: bool = True) -> None:
        """With `weights`, moves the weights to host memory; there is no other memory."""
        if weights and self._offloaded is None:
            self._offloaded = OffloadedWeights(self._tensors())
        self.model.table.link.free_cached()

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        if weights and self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _tensors(self) -> Iterator[Tensor]:
        return chain(tensors_of(self.model), self._steps.output.tensors())
