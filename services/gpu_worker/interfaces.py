"""What the worker's loop needs of its runner and of its links."""

from typing import Protocol

from blockyard.shared.bus import Event
from blockyard.shared.messages import Frame, Geometry, Member, SlotResult, Stats, StepPlan, WorkerIn


class Names(Protocol):
    def listed(self) -> tuple[list[int], bytes]: ...


class StepRunner(Protocol):
    """What executes plans: the model's runner, or one without a model."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def names(self) -> Names: ...
    def reset(self, num_slots: int) -> None: ...
    def execute(self, plan: StepPlan) -> list[SlotResult]: ...


class WorkerLinks(Protocol):
    """The part of `Links` that is used here."""

    @property
    def me(self) -> Member: ...
    def poll(self, timeout_s: float) -> "list[tuple[int, Event | WorkerIn]]": ...
    def answer(self, to: int, frame: Frame) -> bool: ...
    def count(self, stats: Stats) -> None: ...
