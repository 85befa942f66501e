"""A plan in the making."""

from blockyard.services.scheduler.batch.plan_record import PlanRecord
from blockyard.services.scheduler.sequences.requests import Request, Seat
from blockyard.shared.messages import BlockCopy, SlotBlocks, SlotRun, SlotStart


class Draft:
    __slots__ = ("blocks", "budget", "copied", "copies", "fills", "num_owed", "record", "runs", "starts", "written")

    def __init__(self, number: int, budget: int) -> None:
        self.record = PlanRecord(number)
        self.budget = budget  # tokens
        self.starts: list[SlotStart] = []
        self.blocks: list[SlotBlocks] = []
        self.runs: list[SlotRun] = []
        self.copies: list[BlockCopy] = []
        self.copied: dict[int, int] = {}  # source of each of these copies, by its destination
        self.written: list[Request] = []  # with choices that may wait for the prompt that this plan writes the end of
        self.fills: dict[bytes, int] = {}  # blocks by name, to be found by later plans
        self.num_owed = 0  # blocks that somebody waits for in vain

    def grant(self, seat: Seat, num_tokens: int) -> None:
        self.runs.append(SlotRun(seat.slot, num_tokens))
        self.record.seats[seat.slot] = seat
        self.record.chunks[seat.slot] = num_tokens
        seat.granted += num_tokens
        seat.last_plan = self.record.number
        self.budget -= num_tokens

    def source_of(self, block: int) -> int:
        """Block that a copy of `block` has to read: copies are parallel, so what one writes no other one may read."""
        return self.copied.get(block, block)

    def copy(self, src: int, dst: int) -> None:
        """`src` as `source_of` returned it."""
        self.copies.append(BlockCopy(src, dst))
        self.copied[dst] = src

    def decode(self, seat: Seat) -> None:
        """The next token of a seat outside of the lane."""
        self.runs.append(seat.decode)
        self.record.seats[seat.slot] = seat
        seat.granted += 1
        seat.last_plan = self.record.number
        self.budget -= 1
