"""What is remembered of a plan until its result is in."""

from dataclasses import dataclass, field

from blockyard.services.scheduler.batch.decode_batch import BatchRows
from blockyard.services.scheduler.batch.step_times import StepLoad
from blockyard.services.scheduler.sequences.requests import ID_BYTES, RunningSequence
from blockyard.shared.messages import SlotRun


@dataclass(slots=True)
class PlanRecord:
    """A plan in flight: who ran in which slot, so that a slot may have a new owner before its result is in."""

    number: int
    sequences: dict[int, RunningSequence] = field(default_factory=dict)  # those outside of the lane
    chunk_sizes: dict[int, int] = field(default_factory=dict)  # tokens granted to a slot, where it is not one
    rows: list[BatchRows] = field(default_factory=list)  # of the lane
    runs: list[SlotRun] = field(default_factory=list)  # all, in the plan's order: that of the rows, then the others
    filled: list[RunningSequence] = field(
        default_factory=list
    )  # the plan before this one was to write the last of a block
    detached_slots: set[int] = field(
        default_factory=set
    )  # slots to which something has happened since: no rows any more
    dropped_slots: set[int] = field(default_factory=set)  # those whose results count no more

    @property
    def load(self) -> StepLoad:
        return StepLoad(len(self.runs) - len(self.chunk_sizes), sum(self.chunk_sizes.values()))

    def num_scheduled(self, running: RunningSequence) -> int:
        """Tokens granted by this plan to a seat outside of the lane."""
        return self.chunk_sizes.get(running.slot, 1) if self.sequences.get(running.slot) is running else 0

    def all_sequences(self) -> list[RunningSequence]:
        return [*self.sequences.values(), *(running for rows in self.rows for running in rows.sequences)]

    def drop(self, running: RunningSequence) -> None:
        """What comes of a seat counts no more."""
        if self.sequences.get(running.slot) is running:
            del self.sequences[running.slot]
        else:
            self.detached_slots.add(running.slot)
            self.dropped_slots.add(running.slot)

    def detach_rows(self, rows: BatchRows, places: set[int]) -> None:
        """These rows are looked at by themselves."""
        slots = [rows.slots[i] for i in places]
        self.sequences |= {
            slot: rows.sequences[i] for slot, i in zip(slots, places, strict=True) if slot not in self.dropped_slots
        }

    def matches(self, token_ids: bytes) -> bool:
        """Whether there is one for each run, or none at all."""
        return len(token_ids) in {0, ID_BYTES * len(self.runs)}
