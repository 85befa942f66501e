"""What the worker's loop needs of its runner and of its links."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blockyard.shared.bus.links import Event
from blockyard.shared.messages import Frame, Geometry, Member, MemoryTag, SlotResult, SlotRun, Stats, StepPlan, WorkerIn


class DecodeOutputs(Protocol):
    """Slots that computed one more token, drew one, and have nothing else to say, side by side."""

    def __len__(self) -> int: ...

    def to_slot_results(self) -> list[SlotResult]:
        """One by one."""

    def token_ids_by_run(self, runs: Sequence[SlotRun]) -> bytes:
        """Their tokens as in StepResult: uint32 a run, NO_TOKEN of others."""


@dataclass(frozen=True, slots=True)
class CompletedPlan:
    """A plan that has run, and what its slots produced."""

    plan: StepPlan
    slot_results: list[SlotResult]  # besides `decode_outputs`
    stamp_s: float  # CLOCK_REALTIME when that was known
    step_s: float  # time the step took from its launch on, without what it waited for steps before it
    failed_fetches: list[int]  # blocks that do not hold what was to be fetched
    launch_s: float = 0.0  # time the host took to launch the step, where the device computes meanwhile
    decode_outputs: DecodeOutputs | None = None

    @property
    def all_results(self) -> list[SlotResult]:
        """All, one by one."""
        if self.decode_outputs is None:
            return self.slot_results
        return [*self.decode_outputs.to_slot_results(), *self.slot_results]


class CachedBlocks(Protocol):
    def blocks_and_hashes(self) -> tuple[list[int], bytes]: ...
    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]: ...


class StepRunner(Protocol):
    """What executes plans: the model's runner, or one without a model. Plans run in the order they were launched."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def block_hashes(self) -> CachedBlocks: ...

    @property
    def in_flight(self) -> int:
        """Plans that were launched and not collected."""

    def reset(self, num_slots: int) -> None:
        """Waits for what is in flight and drops its results and all slots; KV and its names stay."""

    def reset_prefix_cache(self) -> None:
        """No name of a block counts any more, here or in host memory."""

    def can_launch(self) -> bool:
        """False while as many plans are in flight as it keeps count of."""

    def idle(self) -> bool:
        """Called when nothing is to be done: does a piece of what could wait; False: there is none left."""

    def launch(self, plan: StepPlan) -> None:
        """Begins a plan. A runner that cannot compute beside the caller computes it here."""

    def collect(self) -> list[CompletedPlan]:
        """The plans that are done and were not returned yet, oldest first. Never waits."""


class OffloadableRunner(StepRunner, Protocol):
    """A runner that can do without its memory for a while."""

    def release_memory(self, weights: bool = True) -> None:
        """Gives back the memory of KV, which is forgotten, and of weights that can wait in host memory."""

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        """Takes back what is named. Once both are there it is as before `park`, with KV that is empty."""


class SleepModeRunner(StepRunner, Protocol):
    """A runner that can sleep; `reset` wakes it up."""

    @property
    def level(self) -> int:
        """0 is awake."""

    def sleep(self, level: int) -> int:
        """Returns the bytes that were freed."""

    def wake(self, parts: Sequence[MemoryTag]) -> int:
        """Takes a part of the memory and sleeps on. Returns the bytes that are still free."""


class WorkerLinks(Protocol):
    """The part of `Links` that is used here."""

    @property
    def me(self) -> Member: ...
    def poll(self, timeout_s: float) -> "list[tuple[int, Event | WorkerIn]]": ...
    def answer(self, to: int, frame: Frame) -> bool: ...
    def count(self, stats: Stats) -> None: ...
