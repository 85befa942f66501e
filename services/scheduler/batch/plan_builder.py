"""A plan in the making."""

from blockyard.services.scheduler.batch.plan_record import PlanRecord
from blockyard.services.scheduler.sequences.requests import Request, RunningSequence
from blockyard.shared.messages import BlockCopy, SlotBlocks, SlotRun, SlotStart


class PlanBuilder:
    __slots__ = (
        "blocks",
        "copied",
        "copies",
        "new_hashes",
        "num_blocks_owed",
        "record",
        "runs",
        "starts",
        "token_budget",
        "written_prompts",
    )

    def __init__(self, number: int, token_budget: int) -> None:
        self.record = PlanRecord(number)
        self.token_budget = token_budget  # tokens
        self.starts: list[SlotStart] = []
        self.blocks: list[SlotBlocks] = []
        self.runs: list[SlotRun] = []
        self.copies: list[BlockCopy] = []
        self.copied: dict[int, int] = {}  # source of each of these copies, by its destination
        self.written_prompts: list[
            Request
        ] = []  # with choices that may wait for the prompt that this plan writes the end of
        self.new_hashes: dict[bytes, int] = {}  # blocks by name, to be found by later plans
        self.num_blocks_owed = 0  # blocks that somebody waits for in vain

    def schedule(self, running: RunningSequence, num_tokens: int) -> None:
        self.runs.append(SlotRun(running.slot, num_tokens))
        self.record.sequences[running.slot] = running
        self.record.chunk_sizes[running.slot] = num_tokens
        running.num_scheduled_tokens += num_tokens
        running.last_plan = self.record.number
        self.token_budget -= num_tokens

    def source_of(self, block: int) -> int:
        """Block that a copy of `block` has to read: copies are parallel, so what one writes no other one may read."""
        return self.copied.get(block, block)

    def copy(self, src: int, dst: int) -> None:
        """`src` as `source_of` returned it."""
        self.copies.append(BlockCopy(src, dst))
        self.copied[dst] = src

    def schedule_decode(self, running: RunningSequence) -> None:
        """The next token of a seat outside of the lane."""
        self.runs.append(running.decode)
        self.record.sequences[running.slot] = running
        running.num_scheduled_tokens += 1
        running.last_plan = self.record.number
        self.token_budget -= 1
