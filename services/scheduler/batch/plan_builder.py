"""A plan while it is built, and the record of it until its result is in."""

from array import array
from dataclasses import dataclass, field

from blockyard.services.scheduler.batch.decode_batch import BatchRows
from blockyard.services.scheduler.outbox import FLOAT_BYTES
from blockyard.services.scheduler.plan_pacer import StepLoad
from blockyard.services.scheduler.sequences.packed_texts import TextSlice
from blockyard.services.scheduler.sequences.requests import QueueAmount, Request, RunningSequence, Sequence
from blockyard.shared.messages import BlockCopy, KVSend, PackedVectors, SlotBlocks, SlotRun, SlotStart, StepResult
from blockyard.shared.token_ids import ID_BYTES


@dataclass(frozen=True, slots=True)
class PackedRun:
    """Texts of one request in a packed step."""

    sequence: Sequence
    texts: TextSlice
    queued_s: float  # how long they had waited

    @property
    def amount(self) -> QueueAmount:
        return QueueAmount(self.texts.num_texts, self.texts.num_tokens)

    def is_like(self, other: "PackedRun") -> bool:
        """Whether the results of both are made alike."""
        frame, its = self.texts.columns.frame, other.texts.columns.frame
        has_pairs = bool(frame.second_starts), bool(its.second_starts)
        return frame is its or (frame.params == its.params and frame.skip == its.skip and has_pairs[0] == has_pairs[1])


@dataclass(slots=True)
class PlanRecord:
    """A plan in flight. It keeps the sequence of each slot, because a slot may be reused before the result is in."""

    number: int
    sequences: dict[int, RunningSequence] = field(default_factory=dict)  # outside the decode batch, by slot
    chunk_sizes: dict[int, int] = field(default_factory=dict)  # tokens scheduled of a slot, where it is not one
    rows: list[BatchRows] = field(default_factory=list)  # of the decode batch
    runs: list[SlotRun] = field(default_factory=list)  # in the plan's order: the rows, then `sequences`
    filled: list[RunningSequence] = field(default_factory=list)  # the plan before this one filled a block of theirs
    detached_slots: set[int] = field(default_factory=set)  # no longer in `rows`: handled one by one
    dropped_slots: set[int] = field(default_factory=set)  # results to be ignored
    packed: list[PackedRun] = field(default_factory=list)  # of a model without KV: all that the plan runs

    @property
    def load(self) -> StepLoad:
        if self.packed:
            return StepLoad(0, self.packed_amount.tokens)
        return StepLoad(len(self.runs) - len(self.chunk_sizes), sum(self.chunk_sizes.values()))

    @property
    def packed_amount(self) -> QueueAmount:
        texts = [run.texts for run in self.packed]
        return QueueAmount(sum(one.num_texts for one in texts), sum(one.num_tokens for one in texts))

    def num_scheduled(self, running: RunningSequence) -> int:
        """Tokens that this plan schedules of a sequence outside the decode batch."""
        return self.chunk_sizes.get(running.slot, 1) if self.sequences.get(running.slot) is running else 0

    def all_sequences(self) -> list[RunningSequence]:
        return [*self.sequences.values(), *(running for rows in self.rows for running in rows.sequences)]

    def detach(self, slot: int) -> None:
        """The result of this slot is handled by itself."""
        self.detached_slots.add(slot)

    def drop(self, running: RunningSequence) -> None:
        """The result of this sequence is ignored."""
        if self.sequences.get(running.slot) is running:
            del self.sequences[running.slot]
        else:
            self.detached_slots.add(running.slot)
            self.dropped_slots.add(running.slot)

    def detach_rows(self, rows: BatchRows, places: set[int]) -> None:
        """Moves the rows at `places` to `sequences`."""
        slots = [rows.slots[i] for i in places]
        self.sequences |= {
            slot: rows.sequences[i] for slot, i in zip(slots, places, strict=True) if slot not in self.dropped_slots
        }

    def matches(self, result: StepResult) -> bool:
        """Whether there is a token for each run, or none at all, and as many log-probabilities, or none.

        Of a packed step: whether there is a result for each text.
        """
        if self.packed or result.packed is not None:
            return result.packed is not None and _fits(result.packed, self)
        num_tokens, num_logprobs = len(result.token_ids) / ID_BYTES, len(result.logprobs)
        return num_tokens in (0, len(self.runs)) and num_logprobs in (0, num_tokens)


def _fits(found: PackedVectors, record: PlanRecord) -> bool:
    num_texts = record.packed_amount.sequences
    if len(found.lengths) != ID_BYTES * num_texts or any(one.index >= num_texts for one in found.failures):
        return False
    return FLOAT_BYTES * sum(array("I", found.lengths)) == len(found.data)


class PlanBuilder:
    """Collects what a plan schedules."""

    def __init__(self, number: int, token_budget: int, now: float) -> None:
        self.record = PlanRecord(number)
        self.token_budget = token_budget
        self.now = now
        self.starts: list[SlotStart] = []
        self.blocks: list[SlotBlocks] = []
        self.runs = self.record.runs
        self.copies: list[BlockCopy] = []
        self.copied: dict[int, int] = {}  # source block of each copy by its destination
        self.written_prompts: list[Request] = []  # this plan computes their last prompt tokens
        self.new_hashes: dict[bytes, int] = {}  # blocks that this plan fills, for later plans to find
        self.sends: list[KVSend] = []  # blocks that this plan fills, for other groups
        self.num_blocks_owed = 0  # blocks that sequences of this plan lack

    def schedule(self, running: RunningSequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens of a prompt."""
        self.runs.append(SlotRun(running.slot, num_tokens))
        self.record.sequences[running.slot] = running
        self.record.chunk_sizes[running.slot] = num_tokens
        running.on_scheduled(num_tokens, self.record.number)
        self.token_budget -= num_tokens

    def schedule_decode(self, running: RunningSequence) -> None:
        """The next token of a sequence outside the decode batch."""
        self.runs.append(running.decode)
        self.record.sequences[running.slot] = running
        running.on_scheduled(1, self.record.number)
        self.token_budget -= 1

    def reserve(self, num_tokens: int) -> None:
        """Takes tokens of the budget for the decode batch, which is added with `add_decode_batch`."""
        self.token_budget -= num_tokens

    def add_decode_batch(self, runs: list[SlotRun], rows: list[BatchRows]) -> None:
        """Its runs come first in the plan."""
        self.runs[:0] = runs
        self.record.rows.extend(rows)

    def owe_block(self) -> None:
        """A running sequence lacks a block and is not in this plan."""
        self.num_blocks_owed += 1

    def source_of(self, block: int) -> int:
        """The block that a copy of `block` reads: copies run in parallel, so none may read what another one writes."""
        return self.copied.get(block, block)

    def copy(self, src: int, dst: int) -> None:
        """`src` as `source_of` returned it."""
        self.copies.append(BlockCopy(src, dst))
        self.copied[dst] = src
