"""A worker's batch without a model: slots with lengths, tokens as a function of their position.

It checks every plan: a contradiction to earlier plans is a PlanError. Tests of the scheduler drive it directly.
"""

from array import array
from dataclasses import dataclass, field

from blockyard.services.gpu_worker.mock.kv import MockKV, TokensByBlock
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import (
    FinishReason,
    Geometry,
    PackedStep,
    PackedVectors,
    Sampling,
    SlotBlocks,
    SlotResult,
    SlotRun,
    SlotStart,
    StepPlan,
    TokenLogprobs,
)

FLOAT_BYTES = 4
NO_MASKS = "a mock worker makes no masks of structured output"


class PlanError(BlockyardError):
    """The scheduler and the worker disagree about slots or blocks."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """The tokens: ids in [first_id, end_id), and an end of sequence at about one position in `eos_every`."""

    first_id: int
    end_id: int
    eos_every: int = 0  # 0: never
    echo: bool = False  # tokens repeat the prompt's

    def token(self, sampling: Sampling, choice: int, position: int, prompt: "array[int]", eos: list[int]) -> int:
        """The token at a position of the whole sequence: no slot, batch or restart changes it."""
        mixed = (position * 0x9E3779B1 + choice * 0x85EBCA77 + sampling.seed * 0xC2B2AE3D) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        mixed ^= mixed >> 13
        early = sampling.ignore_eos or position - len(prompt) < sampling.min_tokens
        if self.eos_every and eos and not early and mixed % self.eos_every == 0:
            return eos[0]
        if self.echo:
            return prompt[position % len(prompt)]
        return self.first_id + mixed % (self.end_id - self.first_id)


@dataclass(slots=True, eq=False)
class MockSlot:
    prompt: "array[int]"
    num_tokens: int  # prompt and sampled
    num_computed: int
    blocks: list[int]
    sampling: Sampling
    choice: int
    prompt_logprobs_next: int
    tokens: TokensByBlock  # all tokens
    finished: bool = False
    lost: bool = False  # it started on blocks of a failed fetch: it produces no results
    num_passed: int = 0  # leading blocks outside of the window: they may have other owners
    has_text: bool = True
    num_virtual: int = 0  # leading tokens of the prompt that are those of a prompt adapter

    def add_blocks(self, blocks: list[int]) -> None:
        self.blocks += blocks

    def compute(self, max_tokens: int) -> None:
        """Counts up to `max_tokens` of the known tokens as computed."""
        self.num_computed = min(self.num_computed + max_tokens, self.num_tokens)

    def pass_blocks(self, num_passed: int) -> list[int]:
        """Gives up leading blocks, `num_passed` in all. Returns the blocks that it gives up now."""
        given_up = self.blocks[self.num_passed : num_passed]
        self.num_passed = max(self.num_passed, num_passed)
        return given_up

    def append(self, token: int) -> None:
        self.num_tokens += 1
        self.tokens.append(token)

    def finish(self) -> None:
        """The slot produces no more results."""
        self.finished = True


@dataclass(slots=True)
class MockBatch:
    geometry: Geometry
    num_slots: int
    pattern: Pattern
    kv: MockKV
    slots: dict[int, MockSlot] = field(default_factory=dict)
    owners: dict[int, set[int]] = field(default_factory=dict)  # block -> live slots
    failed: list[int] = field(default_factory=list)  # blocks of the last step that were not fetched, or read without KV

    def __post_init__(self) -> None:
        self.kv.bad.clear()  # their hashes are gone, and no later block was computed from them

    @property
    def has_kv(self) -> bool:
        """False: each text is computed whole, in one step, and slots are only numbers."""
        return self.geometry.pooling is None or self.geometry.pooling.has_kv

    def step(self, plan: StepPlan) -> list[SlotResult]:
        """Applies a plan and computes. Raises PlanError; do not use the batch after that."""
        _check(self.has_kv or not (plan.starts or plan.runs), "a model without KV has slots")
        for slot in plan.ends:
            self._end(slot)
        if self.kv.in_transfer:
            self._check_transfers(plan)
        self._copy(plan)
        for start in plan.starts:
            self._start(start)
        for more in plan.blocks:
            self._append(more)
        limits = self.geometry
        num_tokens = sum(run.max_tokens for run in plan.runs)
        most = limits.max_num_seqs if self.has_kv else limits.max_num_batched_tokens
        _check(len(plan.runs) <= most, f"{len(plan.runs)} runs, the limit is {most}")
        _check(
            num_tokens <= limits.max_num_batched_tokens,
            f"{num_tokens} tokens granted, the limit is {limits.max_num_batched_tokens}",
        )
        _check(len({run.slot for run in plan.runs}) == len(plan.runs), "a slot runs twice")
        return [result for run in plan.runs if (result := self.run_slot(run)) is not None]

    def _end(self, number: int) -> None:
        slot = self.slots.pop(number, None)
        if slot is None:
            raise PlanError(f"end of slot {number}, which is not live")
        self._disown(number, slot.blocks[slot.num_passed :])

    def _disown(self, number: int, blocks: list[int]) -> None:
        for block in blocks:
            owners = self.owners[block]
            owners.discard(number)
            if not owners:
                del self.owners[block]

    def _check_transfers(self, plan: StepPlan) -> None:
        """Blocks that another worker may read or write have no other use until their transfer has ended."""
        used = {copy.dst for copy in plan.copies} | {fetch.block for fetch in plan.fetches}
        used.update(block for more in plan.blocks for block in more.blocks)
        size = self.geometry.block_size
        used.update(block for start in plan.starts for block in start.blocks[-(-start.num_computed // size) :])
        for transfer, blocks in self.kv.in_transfer.items():
            _check(used.isdisjoint(blocks), f"blocks {used & blocks} are in use while transfer {transfer} has them")

    def _copy(self, plan: StepPlan) -> None:
        for save in plan.saves:
            _check(0 <= save.host < self.geometry.num_host_blocks, f"host block {save.host}")
            _check(save.block not in self.owners, f"block {save.block} is saved while slots have it")
            _check(self.kv.save(save), f"block {save.block} is saved as what it is not")
        self.failed = []
        for fetch in plan.fetches:
            _check(fetch.block not in self.owners, f"fetch into block {fetch.block}, which slots have")
            _check(self.kv.has(fetch.host), f"host block {fetch.host} holds nothing to be fetched")
            if not self.kv.fetch(fetch):
                self.failed.append(fetch.block)
                self.kv.hashes.pop(fetch.block, None)
                self.kv.bad.add(fetch.block)
        written = [copy.dst for copy in plan.copies]
        _check(len(set(written)) == len(written), f"a block is written by two copies: {plan.copies}")
        _check(
            {copy.src for copy in plan.copies}.isdisjoint(written),
            f"a copy reads what another one writes: {plan.copies}",
        )
        for copy in plan.copies:
            owners = self.owners.get(copy.dst)
            _check(not owners, f"block {copy.dst} is written by a copy and is slot {min(owners or [0])}'s")
        self.kv.copy(plan.copies)

    def _start(self, start: SlotStart) -> None:
        _check(0 <= start.slot < self.num_slots, f"slot {start.slot} is outside 0 to {self.num_slots - 1}")
        _check(start.slot not in self.slots, f"start in slot {start.slot}, which is live")
        ids = array("I")
        ids.frombytes(start.token_ids)
        _check(0 < start.num_prompt_tokens <= len(ids), f"{start.num_prompt_tokens} prompt tokens of {len(ids)}")
        _check(len(ids) <= self.geometry.max_model_len, f"{len(ids)} tokens start, limit {self.geometry.max_model_len}")
        _check(0 <= start.num_computed < len(ids), f"{start.num_computed} of {len(ids)} tokens computed at start")
        num_full, rest = divmod(start.num_computed, self.geometry.block_size)
        tokens = TokensByBlock(start.token_ids, self.geometry.block_size)
        found = start.blocks[: num_full + bool(rest)]
        seen = self._first_seen(start.num_computed)
        passed = seen // self.geometry.block_size
        lost = not self.kv.bad.isdisjoint(found[passed:])
        if lost:
            self.failed = sorted(self.kv.bad.intersection(found[passed:]).union(self.failed))
        different = self.kv.first_difference(found, tokens, start.num_computed, seen)
        _check(lost or different is None, f"slot {start.slot} starts on KV that is not its own at {different}")
        slot = self.slots[start.slot] = MockSlot(
            ids[: start.num_prompt_tokens],
            len(ids),
            start.num_computed,
            found[:passed],
            start.sampling,
            start.choice,
            start.prompt_logprobs_from,
            tokens,
            finished=lost,
            lost=lost,
            num_passed=passed,
            has_text=start.has_text,
            num_virtual=start.num_virtual_tokens,
        )
        for block in found[passed:num_full]:
            self.owners.setdefault(block, set()).add(start.slot)
        slot.add_blocks(found[passed:num_full])
        self._append(SlotBlocks(start.slot, start.blocks[num_full:]))

    def _append(self, more: SlotBlocks) -> None:
        slot = self._live(more.slot)
        limit, all_owners = self.geometry.num_blocks, self.owners
        for block in more.blocks:
            if not 0 <= block < limit:
                raise PlanError(f"block {block} of {limit}")
            if owners := all_owners.get(block):
                raise PlanError(f"block {block} of slot {more.slot} is slot {min(owners)}'s")
            all_owners[block] = {more.slot}
        slot.add_blocks(more.blocks)
        if slot.lost:
            self.kv.bad.update(more.blocks)

    def run_slot(self, run: SlotRun) -> SlotResult | None:
        """Runs one slot of a plan. Returns None if it has ended."""
        slot = self._live(run.slot)
        _check(run.max_tokens > 0, f"slot {run.slot} runs for {run.max_tokens} tokens")
        if slot.finished:
            return None
        before = slot.num_computed
        slot.compute(run.max_tokens)
        room = len(slot.blocks) * self.geometry.block_size
        _check(slot.num_computed <= room, f"slot {run.slot} computes {slot.num_computed} tokens, blocks hold {room}")
        different = self.kv.first_difference(slot.blocks, slot.tokens, before, self._first_seen(before, before))
        _check(different is None, f"slot {run.slot} reads KV that is not its own at {different}")
        self.kv.write(slot.blocks, before, slot.num_computed, slot.tokens)
        self._release_passed(run.slot, slot)
        first, prompt_logprobs = self._prompt_logprobs(slot, before)
        if slot.num_computed < slot.num_tokens:
            return SlotResult(run.slot, [], slot.num_computed, None, None, [], first, prompt_logprobs)
        if not slot.has_text:
            slot.finish()
            vector, width = pooled(self.geometry, slot.prompt)
            return SlotResult(run.slot, [], slot.num_computed, FinishReason.STOP, vector=vector, width=width)
        if slot.sampling.constraint is not None:
            slot.finish()
            return SlotResult(run.slot, [], slot.num_computed, FinishReason.FAILED, detail=NO_MASKS, status=400)
        token_ids, finish, stop_token = self._sample(slot)
        if finish is not None:
            slot.finish()
        num_candidates = slot.sampling.num_logprobs
        logprobs = []
        if num_candidates is not None:
            state = slot.tokens.state(slot.num_computed)
            logprobs = [likeliest(token, num_candidates, state) for token in token_ids]
            if listed := slot.sampling.logprob_token_ids:
                logprobs = [with_candidates(entry, listed) for entry in logprobs]
        return SlotResult(run.slot, token_ids, slot.num_computed, finish, stop_token, logprobs, first, prompt_logprobs)

    def _first_seen(self, num_computed: int, default: int = 0) -> int:
        """The first token in the window of the next one; `default` if there is no window."""
        window = self.geometry.window
        return default if window is None else max(0, num_computed - window + 1)

    def _release_passed(self, number: int, slot: MockSlot) -> None:
        """Gives up blocks that are outside of the slot's window: they may have other owners."""
        self._disown(number, slot.pass_blocks(self._first_seen(slot.num_computed) // self.geometry.block_size))

    def _sample(self, slot: MockSlot) -> tuple[list[int], FinishReason | None, int | None]:
        sampling, num_prompt = slot.sampling, len(slot.prompt)
        if slot.num_tokens - num_prompt >= sampling.max_tokens or slot.num_tokens >= self.geometry.max_model_len:
            return [], FinishReason.LENGTH, None
        eos = self.geometry.eos_token_ids
        choice = slot.choice if sampling.temperature else 0
        token = self.pattern.token(sampling, choice, slot.num_tokens, slot.prompt, eos)
        slot.append(token)
        num_outputs = slot.num_tokens - num_prompt
        if num_outputs > sampling.min_tokens and token in sampling.stop_token_ids:
            return [token], FinishReason.STOP, token
        if token in eos and not sampling.ignore_eos and num_outputs > sampling.min_tokens:
            return [token], FinishReason.STOP, None
        if num_outputs >= sampling.max_tokens or slot.num_tokens >= self.geometry.max_model_len:
            return [token], FinishReason.LENGTH, None
        return [token], None, None

    def _prompt_logprobs(self, slot: MockSlot, before: int) -> tuple[int, list[TokenLogprobs]]:
        """Position p is scored by the logits of p - 1; the client's first token by none."""
        if slot.sampling.num_prompt_logprobs is None:
            return 0, []
        first = max(before + 1, slot.prompt_logprobs_next, slot.num_virtual + 1)
        end = min(slot.num_computed + 1, len(slot.prompt))
        return first, [likeliest(slot.prompt[p], slot.sampling.num_prompt_logprobs) for p in range(first, end)]

    def _live(self, number: int) -> MockSlot:
        slot = self.slots.get(number)
        if slot is None:
            raise PlanError(f"slot {number} is not live")
        return slot


def pooled(geometry: Geometry, prompt: "array[int]") -> tuple[bytes, int]:
    """A vector of the prompt's ids, from its last one back, again and again, and 0; of tokens one for each, and its
    width."""
    card = geometry.pooling
    assert card is not None, "the model generates text"
    backwards = array("f", prompt[::-1]) * (card.width // len(prompt) + 1)
    row = backwards[: card.width].tobytes()
    return (row * len(prompt), card.width) if card.of_tokens else (row, 0)


def run_packed(geometry: Geometry, step: PackedStep) -> PackedVectors:
    """Raises PlanError for a step that is larger than it may be, or has columns that contradict each other."""
    ids, lengths = array("I", step.token_ids), array("I", step.lengths)
    _check(len(ids) == sum(lengths), f"{len(ids)} ids of texts with {sum(lengths)} tokens")
    _check(len(lengths) == sum(part.count for part in step.parts), f"{len(lengths)} texts in {step.parts}")
    most = geometry.max_num_batched_tokens
    _check(len(ids) <= most, f"{len(ids)} tokens in a step, limit {most}")
    data: list[bytes] = []
    end = width = 0
    for length in lengths:
        first, end = end, end + length
        vector, width = pooled(geometry, ids[first:end])
        data.append(vector)
    sizes = array("I", [len(vector) // FLOAT_BYTES for vector in data])
    return PackedVectors(sizes.tobytes(), b"".join(data), [width] * len(step.parts))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def likeliest(token: int, num_candidates: int, state: int = 0) -> TokenLogprobs:
    """Made-up log-probabilities in order, with the token first. `state` decides the other candidates and the values."""
    top = [token, *(i for i in range(state % 50, state % 50 + num_candidates) if i != token)][:num_candidates]
    return TokenLogprobs(token, -0.5, 1, top, [-0.5 - i - (state >> i) % 1009 / 1200 for i in range(len(top))])


def with_candidates(entry: TokenLogprobs, listed: list[int]) -> TokenLogprobs:
    """The entry with these candidates, with made-up values, too."""
    values = [entry.logprob if token == entry.token_id else -1.0 - token % 1009 / 1200 for token in listed]
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, listed, values)
