"""What is remembered of a plan until its result is in."""

from dataclasses import dataclass, field

from blockyard.services.scheduler.batch.decode_batch import Rows
from blockyard.services.scheduler.batch.step_times import Load
from blockyard.services.scheduler.sequences.requests import ID_BYTES, Seat
from blockyard.shared.messages import SlotRun


@dataclass(slots=True)
class PlanRecord:
    """A plan in flight: who ran in which slot, so that a slot may have a new owner before its result is in."""

    number: int
    seats: dict[int, Seat] = field(default_factory=dict)  # those outside of the lane
    chunks: dict[int, int] = field(default_factory=dict)  # tokens granted to a slot, where it is not one
    rows: list[Rows] = field(default_factory=list)  # of the lane
    runs: list[SlotRun] = field(default_factory=list)  # all, in the plan's order: that of the rows, then the others
    filled: list[Seat] = field(default_factory=list)  # the plan before this one was to write the last of a block
    apart: set[int] = field(default_factory=set)  # slots to which something has happened since: no rows any more
    dropped: set[int] = field(default_factory=set)  # those whose results count no more

    @property
    def load(self) -> Load:
        return Load(len(self.runs) - len(self.chunks), sum(self.chunks.values()))

    def granted(self, seat: Seat) -> int:
        """Tokens granted by this plan to a seat outside of the lane."""
        return self.chunks.get(seat.slot, 1) if self.seats.get(seat.slot) is seat else 0

    def all_seats(self) -> list[Seat]:
        return [*self.seats.values(), *(seat for rows in self.rows for seat in rows.seats)]

    def drop(self, seat: Seat) -> None:
        """What comes of a seat counts no more."""
        if self.seats.get(seat.slot) is seat:
            del self.seats[seat.slot]
        else:
            self.apart.add(seat.slot)
            self.dropped.add(seat.slot)

    def take_apart(self, rows: Rows, places: set[int]) -> None:
        """These rows are looked at by themselves."""
        slots = [rows.slots[i] for i in places]
        self.seats |= {slot: rows.seats[i] for slot, i in zip(slots, places, strict=True) if slot not in self.dropped}

    def fits(self, token_ids: bytes) -> bool:
        """Whether there is one for each run, or none at all."""
        return len(token_ids) in {0, ID_BYTES * len(self.runs)}
