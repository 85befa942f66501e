"""The interfaces between the worker's loop, its runner and its links. Imports neither torch nor numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blockyard.shared.bus.member_list import Event
from blockyard.shared.messages import Frame, Geometry, Member, MemoryTag, SlotResult, SlotRun, Stats, StepPlan, WorkerIn


class DecodeOutputs(Protocol):
    """Results of slots that computed one token and sampled one, as arrays. Nothing else happened to them."""

    def __len__(self) -> int: ...

    def to_slot_results(self) -> list[SlotResult]:
        """One `SlotResult` for each slot."""

    def token_ids_by_run(self, runs: Sequence[SlotRun]) -> bytes:
        """The tokens as in StepResult: one uint32 for each run, NO_TOKEN for slots that are not here."""


@dataclass(frozen=True, slots=True)
class CompletedPlan:
    """A plan that has run, and the results of its slots."""

    plan: StepPlan
    slot_results: list[SlotResult]  # besides `decode_outputs`
    stamp_s: float  # CLOCK_REALTIME when the host saw that it was done
    step_s: float  # from launch to completion, less the wait for earlier steps
    failed_fetches: list[int]  # blocks that were not fetched
    launch_s: float = 0.0  # host time to launch the step; 0 where the host computes it
    decode_outputs: DecodeOutputs | None = None

    @property
    def all_results(self) -> list[SlotResult]:
        """Of all slots."""
        if self.decode_outputs is None:
            return self.slot_results
        return [*self.decode_outputs.to_slot_results(), *self.slot_results]


class CachedBlocks(Protocol):
    def blocks_and_hashes(self) -> tuple[list[int], bytes]: ...
    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]: ...


class StepRunner(Protocol):
    """Executes plans in the order of their launch: `runner.Runner`, or the mock without a model."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def block_hashes(self) -> CachedBlocks: ...

    @property
    def in_flight(self) -> int:
        """Number of plans that were launched and not collected."""

    def reset(self, num_slots: int) -> None:
        """Waits for plans in flight, then drops their results and all slots. KV and block hashes stay."""

    def reset_prefix_cache(self) -> None:
        """Forgets all block hashes, of the pool and of host memory."""

    def can_launch(self) -> bool:
        """False while as many plans are in flight as it has buffers for."""

    def idle(self) -> bool:
        """Called when the worker has no plan: does one piece of background work. False: none is left."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan. A runner without a device computes it before it returns."""

    def collect(self) -> list[CompletedPlan]:
        """Plans that are done and were not returned yet, oldest first. Never waits."""


class OffloadableRunner(StepRunner, Protocol):
    """A runner that can give its memory back for a while."""

    def release_memory(self, weights: bool = True) -> None:
        """Frees the memory of KV, with its contents, and of weights, which move to host memory."""

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        """Takes the named memory back. With both it runs as before `release_memory`, with an empty KV cache."""


class SleepModeRunner(StepRunner, Protocol):
    """A runner that can sleep; `reset` wakes it up."""

    @property
    def level(self) -> int:
        """0 is awake."""

    def sleep(self, level: int) -> int:
        """Returns the bytes that were freed."""

    def wake(self, parts: Sequence[MemoryTag]) -> int:
        """Takes a part of the memory back and still sleeps. Returns the bytes that are still free."""


class WorkerLinks(Protocol):
    """The part of `Links` that is used here."""

    @property
    def me(self) -> Member: ...
    def poll(self, timeout_s: float) -> "list[tuple[int, Event | WorkerIn]]": ...
    def answer(self, to: int, frame: Frame) -> bool: ...
    def count(self, stats: Stats) -> None: ...
