"""Sleep mode: a runner that gives its memory back for a while. Imports no torch."""

import gc
import logging
import time
from collections.abc import Callable, Sequence

from blockyard.services.gpu_worker.interfaces import (
    AdapterHost,
    CachedBlocks,
    CompletedPlan,
    OffloadableRunner,
    StoredLayers,
)
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.messages import Geometry, MemoryTag, Stats, StepPlan

log = logging.getLogger(__name__)

NOTHING_LEFT = 2  # the sleep level without weights and KV; at level 1 the weights are in host memory


class SleepingRunner:
    """Forwards calls to the runner that `start` made; `reset` wakes it up.

    At level 1 the runner has its weights in host memory and no KV. At level 2 there is no runner, and waking up reads
    the weights again. held_bytes: device memory of this process. on_awake: called when a runner is awake again.
    """

    def __init__(
        self,
        start: Callable[[], OffloadableRunner],
        held_bytes: Callable[[], int],
        on_awake: Callable[[], None] = lambda: None,
    ) -> None:
        self.level = 0
        self.freed_bytes = 0
        self._woken: set[MemoryTag] = set()  # taken back while asleep
        self._start, self._held_bytes, self._on_awake = start, held_bytes, on_awake
        self._runner: OffloadableRunner | None = start()
        self._geometry = self._runner.geometry

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def block_hashes(self) -> CachedBlocks:
        return self._awake().block_hashes

    @property
    def kv_memory(self) -> TransferBlocks:
        return self._awake().kv_memory

    @property
    def adapters(self) -> AdapterHost | None:
        return None if self._runner is None else self._runner.adapters

    @property
    def in_flight(self) -> int:
        return 0 if self._runner is None else self._runner.in_flight

    def can_launch(self) -> bool:
        return self._awake().can_launch()

    def join_step(self) -> bool:
        return not self.level and self._awake().join_step()

    def idle(self) -> bool:
        return not self.level and self._awake().idle()

    def launch(self, plan: StepPlan) -> Sequence[StoredLayers]:
        return self._awake().launch(plan)

    def collect(self) -> list[CompletedPlan]:
        return [] if self._runner is None else self._runner.collect()

    def sample_rows(self) -> None:
        if self._runner is not None:
            self._runner.sample_rows()

    def count(self, stats: Stats) -> Stats:
        return stats if self._runner is None else self._runner.count(stats)

    def reset(self, num_slots: int) -> None:
        if self.level:
            self._wake()
        self._awake().reset(num_slots)

    def reset_prefix_cache(self) -> None:
        self._awake().reset_prefix_cache()

    def sleep(self, level: int) -> int:
        """Waits for plans in flight and drops their results. Returns the freed bytes. A deeper sleep stays."""
        if level <= self.level and not self._woken:
            return self.freed_bytes
        level = max(level, self.level)
        before = self._held_bytes() + self.freed_bytes
        if not self.level:
            self._awake().reset(0)
            self._awake().reset_prefix_cache()
        if level == NOTHING_LEFT:
            self._runner = None
        elif self._runner is not None:
            self._runner.release_memory()
        gc.unfreeze()
        gc.collect()
        self._woken.clear()
        self.level = level
        self.freed_bytes = max(0, before - self._held_bytes())
        log.info("asleep at level %d: %.1f MiB were freed", level, self.freed_bytes / 2**20)
        return self.freed_bytes

    def wake(self, parts: Sequence[MemoryTag]) -> int:
        """At level 2 KV memory waits for the weights, because a start decides its size."""
        if not self.level:
            return 0
        before = self._held_bytes()
        self._woken.update(parts)
        if self._runner is not None:
            self._reclaim_memory(self._runner, MemoryTag.WEIGHTS in self._woken, MemoryTag.KV_CACHE in self._woken)
        if self._runner is None and MemoryTag.WEIGHTS in self._woken:
            self._begin()
            if MemoryTag.KV_CACHE not in self._woken:
                self._awake().release_memory(weights=False)
        self.freed_bytes = max(0, self.freed_bytes - max(0, self._held_bytes() - before))
        log.info("awake in part: %s", ", ".join(sorted(self._woken)))
        return self.freed_bytes

    def _wake(self) -> None:
        began = time.monotonic()
        if self._runner is not None:
            self._reclaim_memory(self._runner)
        if self._runner is None:
            self._begin()
        self._woken.clear()
        self.level, self.freed_bytes = 0, 0
        self._on_awake()
        log.info("awake after %.2f s", time.monotonic() - began)

    def _begin(self) -> None:
        self._runner = self._start()
        self._geometry = self._runner.geometry

    def _reclaim_memory(self, runner: OffloadableRunner, weights: bool = True, kv: bool = True) -> None:
        try:
            runner.reclaim_memory(weights, kv)
        except RuntimeError:  # most likely out of memory: a new runner plans with the memory that is free
            log.exception("what was parked does not come back: starting anew")
            self._runner = None
            del runner
            gc.collect()

    def _awake(self) -> OffloadableRunner:
        assert self._runner is not None, "there is no runner in deep sleep"
        return self._runner
