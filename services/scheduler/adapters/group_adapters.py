"""The adapters of one worker group: in host memory, in places of the device, and in use.

A sequence that starts takes its adapter's place and gives it back when it leaves the batch. So does a handover to this
group, from before its blocks are reserved until they have landed. A place without sequences keeps its adapter until
another one needs it, the least recently used first.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from blockyard.services.scheduler.adapters.held_adapters import HeldAdapter, HeldAdapters, HostChanges
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.shared.messages import AdapterPlaced, Geometry

MOST_LOADING = 6  # at a time: a worker reads some and arranges others meanwhile


@dataclass(slots=True)
class AdapterPlace:
    adapter: int | None = None
    num_sequences: int = 0  # that run, or are on their way to this group
    last_plan: int = 0  # number of the last plan that may read it, once it has no sequences
    used: int = 0  # turn of its last use
    closed_s: float | None = None  # since when no sequence starts with it: another adapter has waited for long


class GroupAdapters(HeldAdapters):
    """Pure state: numbers of adapters and plans. No frames, no time."""

    def __init__(self, geometry: Geometry, plan_clock: PlanClock) -> None:
        super().__init__(serves_any=geometry.num_adapter_places > 0)
        self._places = [AdapterPlace() for _ in range(geometry.num_adapter_places)]
        self._num_host = geometry.num_host_adapters
        self._plan_clock = plan_clock
        self._turn = 0
        self._next: int | None = None  # an adapter that has waited for long: no other one gets a place before it
        self._place_of: dict[int, int] = {}  # by adapter
        self.placed: list[AdapterPlaced] = []  # by the next plan

    @property
    def num_places(self) -> int:
        return len(self._places)

    def is_placed(self, adapter: int) -> bool:
        return adapter in self._place_of

    def num_sequences(self, adapter: int) -> int:
        place = self._place_of.get(adapter)
        return 0 if place is None else self._places[place].num_sequences

    # host memory

    def take_changes(self, waiting: Sequence[int] = ()) -> HostChanges:
        """What to tell the worker now. Adapters that nothing uses make room, the least recently used first.

        waiting: adapters of waiting sequences, set aside or not, the longest first. One that was loaded for them stays
        until the first of them has started: otherwise two adapters could displace each other for ever. Only the next
        adapter displaces those that have waited less. One that no sequence waits for is read to be checked, and has
        room of its own: a command need not wait for requests.
        """
        changes = HostChanges()
        if self._next is not None and self._next in self._wanted:
            self._wanted.remove(self._next)
            self._wanted.appendleft(self._next)
        while self._wanted and sum(not held.is_loaded for held in self._held.values()) < MOST_LOADING:
            first = self._wanted[0]
            room = self._num_host + (first not in waiting)
            kept = waiting[: waiting.index(first)] if first == self._next and first in waiting else waiting
            while len(self._held) >= room and (idle := self._least_used_in_host(kept)) is not None:
                self._drop(idle)
                changes.drop.append(idle)
            if len(self._held) >= room:
                break
            self._turn += 1
            adapter = self._wanted.popleft()
            self._held[adapter] = HeldAdapter(adapter, used=self._turn)
            changes.load.append(adapter)
        return changes

    # places

    def can_start(self, adapter: int) -> bool:
        """Whether a sequence with this adapter may start in the next plan."""
        index = self._place_of.get(adapter)
        if index is not None:
            return self._places[index].closed_s is None
        if self._next is not None and self._next != adapter and self.is_loaded(self._next):
            return False  # while that one is not even read, others may use the place
        return self.is_loaded(adapter) and self._free_place() is not None

    def start(self, adapter: int) -> int:
        """A sequence starts in the next plan, or is on its way. Returns its place. The caller has asked `can_start`."""
        index, self._turn = self._place_of.get(adapter), self._turn + 1
        if index is None:
            index = self._free_place()
            assert index is not None, f"no place for adapter {adapter}"
            place = self._places[index]
            if place.adapter is not None:
                del self._place_of[place.adapter]
            place.adapter, self._place_of[adapter], place.closed_s = adapter, index, None
            if self._next == adapter:
                self._next = None
            self._unplace(index)
            self.placed.append(AdapterPlaced(index, adapter))
        place = self._places[index]
        place.num_sequences += 1
        place.used = self._turn
        if (held := self._held.get(adapter)) is not None:
            held.used, held.has_started = self._turn, True
        return index

    def take_placed(self) -> list[AdapterPlaced]:
        """What the next plan places."""
        placed, self.placed = self.placed, []
        return placed

    def make_room(self, overdue: Sequence[int], now: float) -> AdapterPlace | None:
        """Adapters have waited for a place for long, the longest first. The first of them that lacks one here is next.

        Returns the least recently used place, which takes no new sequences until another adapter has it; None if there
        is a free place and memory to load the adapter into.
        """
        self._next = next((one for one in overdue if one not in self._place_of and not self.is_refused(one)), None)
        if self._next is None:
            for place in self._places:
                place.closed_s = None
            return None
        has_memory = self._next in self._held or len(self._held) < self._num_host
        if (has_memory or self._least_used_in_host(()) is not None) and self._free_place() is not None:
            return None
        closed = next((place for place in self._places if place.closed_s is not None), None)
        if closed is None:
            closed = min(self._places, key=lambda place: place.used)
            closed.closed_s = now
        return closed

    def index(self, place: AdapterPlace) -> int:
        return self._places.index(place)

    def end(self, index: int) -> None:
        """A sequence leaves the batch, or is no longer on its way. Plans in flight may still read its place."""
        place = self._places[index]
        place.num_sequences -= 1
        assert place.num_sequences >= 0, f"place {index} has fewer sequences than none"
        place.last_plan = self._plan_clock.last_sent

    def _free_place(self) -> int | None:
        """A place that another adapter may have now: one never used, or else the least recently used one."""
        done = self._plan_clock.last_completed
        free = [i for i, one in enumerate(self._places) if not one.num_sequences and one.last_plan <= done]
        return min(free, key=lambda i: (self._places[i].adapter is not None, self._places[i].used), default=None)

    def _least_used_in_host(self, kept: Container[int]) -> int | None:
        idle = [
            held
            for held in self._held.values()
            if held.is_loaded and not self.num_sequences(held.number) and (held.has_started or held.number not in kept)
        ]
        return min(idle, key=lambda held: held.used).number if idle else None

    def _drop(self, adapter: int) -> bool:
        index = self._place_of.pop(adapter, None)
        if index is not None:
            self._places[index].adapter, self._places[index].closed_s = None, None
            self._unplace(index)
        return super()._drop(adapter)

    def _unplace(self, index: int) -> None:
        """The next plan does not give this place to the adapter that it was to have."""
        self.placed = [one for one in self.placed if one.place != index]
