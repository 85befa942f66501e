"""Token ids, lengths and block tables of the running sequences, one row for each slot. Imports no torch."""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from blockyard.services.gpu_worker.arrays import Bools, Integers, Ints
from blockyard.shared.messages import PooledStart, Sampling, SlotBlocks, SlotRun, SlotStart

NO_PLACE = -1  # in arrays of adapters' places: a sequence without an adapter


class SlotError(Exception):
    """The reason that a slot cannot run. Only this slot fails."""


class Problem(NamedTuple):
    """Why a slot fails that has started."""

    cause: str
    status: int = 500  # of the answer in HTTP: 400 where the sampling parameters are the cause


NOT_FINITE = Problem("the model's logits are not finite")
NONE_ALLOWED = Problem("no token is allowed here", 400)


@dataclass(slots=True)
class Slot:
    """The parameters of a sequence that are not in the arrays of `Slots`."""

    sampling: Sampling
    choice: int
    num_prompt_tokens: int
    max_num_tokens: int  # length at max_tokens or max_model_len, whichever is less
    prompt_logprobs_from: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    pooled: PooledStart | None = None
    num_virtual: int = 0  # leading tokens of the prompt that are those of a prompt adapter
    vocab_size: int = 0  # ids that it may name and sample: the model's, and those that its adapter adds

    @property
    def ends_at_eos(self) -> bool:
        """With a constraint also despite ignore_eos: the mask allows an end only where nothing else may follow."""
        return not self.sampling.ignore_eos or self.sampling.constraint is not None


@dataclass(frozen=True, slots=True)
class StepRows:
    """The sequences of a step, one row each: it computes the next `counts` tokens of each slot.

    Decodes, which compute one token, come first. The others are chunks of prefills.
    """

    slots: Ints
    counts: Ints
    num_decodes: int

    @classmethod
    def sorted(cls, slots: Ints, counts: Ints, virtual: Bools | None = None) -> "StepRows":
        """Rows of slots in any order, which is kept among decodes and among prefills.

        virtual: slots whose next token is one of a prompt adapter: prefills, also if it is one. None: no slot's is.
        """
        if not len(counts) or (counts.max() == 1 and virtual is None):
            return cls(slots, counts, len(counts))
        is_prefill = counts > 1 if virtual is None else (counts > 1) | virtual
        order = np.argsort(is_prefill, kind="stable")
        return cls(slots[order], counts[order], len(counts) - int(is_prefill.sum()))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def decodes(self) -> Ints:
        """Their slots."""
        return self.slots[: self.num_decodes]

    @property
    def has_prefill(self) -> bool:
        return self.num_decodes < len(self.slots)

    def cut(self, most: int) -> "StepRows":
        return StepRows(self.slots[:most], self.counts[:most], min(self.num_decodes, most))


class Slots:
    """The state of all slots. A slot is `live` from its start until it finishes, fails or is ended."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_blocks: int,
        num_extra_tokens: int = 0,
    ) -> None:
        """num_extra_tokens: behind the vocabulary, at most, of slots whose adapter adds tokens."""
        self._limits = (max_model_len, vocab_size, num_blocks)
        self._num_extra_tokens = num_extra_tokens
        self.block_size = block_size
        self.token_ids = np.zeros((num_slots, max_model_len), np.int64)
        self.tables = np.zeros((num_slots, -(-max_model_len // block_size)), np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)  # tokens with a known id, or sampled by a step in flight
        self.num_known = np.zeros(num_slots, np.int64)  # tokens with a known id
        self.num_computed = np.zeros(num_slots, np.int64)  # tokens with KV
        self.num_start_tokens = np.zeros(num_slots, np.int64)  # tokens when the slot started
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.adapter_places = np.full(num_slots, NO_PLACE, np.int32)
        self.num_adapted = 0  # slots that have an adapter
        self.num_virtual = np.zeros(num_slots, np.int64)  # leading tokens that are those of a prompt adapter
        self.num_prompted = 0  # slots that have some
        self.owners = np.zeros(num_slots, np.int64)  # unique for each start
        self._starts = itertools.count(1)
        self.live = np.zeros(num_slots, np.bool_)
        self.slots: dict[int, Slot] = {}
        self.errors: dict[int, str] = {}  # by slot; the next run of the slot fails with this message

    def start(self, start: SlotStart) -> bool:
        """Starts a slot. Returns False if it cannot run: then `errors` has the reason for its first run."""
        self.end(start.slot)
        try:
            self._start(start)
        except SlotError as e:
            self.errors[start.slot] = str(e)
            return False
        return True

    def end(self, slot: int) -> None:
        """Frees a slot. Unknown slots are ignored."""
        self.errors.pop(slot, None)
        if self.slots.pop(slot, None) is not None:
            self.live[slot] = False
            self.num_adapted -= int(self.adapter_places[slot] != NO_PLACE)
            self.adapter_places[slot] = NO_PLACE
            self.num_prompted -= int(self.num_virtual[slot] > 0)
            self.num_virtual[slot] = 0
            self.num_tokens[slot] = self.num_known[slot] = self.num_computed[slot] = self.num_blocks[slot] = 0

    def are_adapted(self, slots: Ints) -> bool:
        return self.num_adapted > 0 and bool((self.adapter_places[slots] != NO_PLACE).any())

    def finish(self, slot: int) -> None:
        """Stops scheduling a slot. Its state is kept until it is ended."""
        self.live[slot] = False

    def fail(self, slot: int, error: str = "") -> None:
        """Stops scheduling a slot. Its next run reports `error`, if not empty."""
        self.live[slot] = False
        if error:
            self.errors[slot] = error

    def add_blocks(self, added: SlotBlocks) -> None:
        slot = added.slot
        if slot not in self.slots:
            return
        try:
            self._append_blocks(slot, added.blocks)
        except SlotError as e:
            self.fail(slot, str(e))

    def scheduled(self, runs: list[SlotRun]) -> StepRows:
        """Returns the slots that compute tokens in this step.

        The number of tokens is limited by the plan, by the known tokens and by the blocks of the slot. Ended slots are
        left out.
        """
        slots = np.array([run.slot for run in runs], np.int64)  # an array of pairs would take five times as long
        most = np.array([run.max_tokens for run in runs], np.int64)
        there = (slots >= 0) & (slots < len(self.live))
        if not there.all():
            slots, most = slots[there], most[there]
        room = np.minimum(self.num_tokens[slots], self.num_blocks[slots] * self.block_size) - self.num_computed[slots]
        counts = np.minimum(most, room)
        runs_now = self.live[slots] & (counts > 0)
        slots, counts = slots[runs_now], counts[runs_now]
        virtual = self.num_computed[slots] < self.num_virtual[slots] if self.num_prompted else None
        return StepRows.sorted(slots, counts, virtual)

    def advance(self, slots: Ints, counts: Ints) -> None:
        """Counts the next `counts` tokens of each slot as computed."""
        self.num_computed[slots] += counts

    def advance_ahead(self, slots: Ints, counts: Ints, waits: Bools | None = None) -> None:
        """Counts tokens of a step in flight as computed.

        A slot at its last token gets one more, without an id. Slots that wait there compute that token again; None: no
        slot waits.
        """
        positions = self.num_computed[slots] + counts
        known = self.num_tokens[slots]
        at_end = positions == known
        if waits is None:
            self.num_computed[slots] = positions
            self.num_tokens[slots] = known + at_end
        else:
            self.num_computed[slots] = positions - (at_end & waits)
            self.num_tokens[slots] = known + (at_end & ~waits)

    def advance_sampled(self, slots: Ints, lengths: Integers, token_ids: Integers) -> None:
        """Counts all known tokens of each slot, `lengths`, as computed, and adds a token: `advance_ahead` and
        `set_tokens` in one, for a step that is done."""
        self.token_ids[slots, lengths] = token_ids
        self.num_computed[slots] = lengths
        self.num_tokens[slots] = self.num_known[slots] = lengths + 1

    def take_back(self, slot: int) -> None:
        """The slot got no token in a step for which `advance_ahead` added one: it computes its last token again."""
        self.num_computed[slot] -= 1
        self.num_tokens[slot] -= 1

    def set_tokens(self, slots: Ints, positions: Integers, token_ids: Integers) -> None:
        """Sets the ids of tokens that `advance_ahead` added."""
        self.token_ids[slots, positions] = token_ids
        self.num_known[slots] = positions + 1

    def scored(self, slot: int, begin: int, count: int) -> range:
        """Positions of the prompt that get log-probabilities in a step of `count` tokens after the first `begin`."""
        state = self.slots[slot]
        first = max(begin, state.num_virtual) + 1
        return range(max(first, state.prompt_logprobs_from), min(begin + count + 1, state.num_prompt_tokens))

    def step_back(self, slots: Ints) -> None:
        """Counts the last computed token of each slot as not computed: the next step computes it again and samples."""
        self.num_computed[slots] -= 1

    def append(self, slots: Ints, token_ids: Ints) -> None:
        """Adds one token to each slot. A slot at max_model_len counts the token without storing it."""
        known = self.num_tokens[slots]
        fits = known < self.token_ids.shape[1]
        self.token_ids[slots[fits], known[fits]] = token_ids[fits]
        self.num_tokens[slots] = self.num_known[slots] = known + 1

    def _start(self, start: SlotStart) -> None:
        max_model_len, vocab_size, _ = self._limits
        slot, ids = start.slot, np.frombuffer(start.token_ids, "<u4")
        if not 0 <= slot < len(self.live):
            raise SlotError(f"slot {slot} is outside of 0 to {len(self.live) - 1}")
        if not 0 < len(ids) <= max_model_len:
            raise SlotError(f"{len(ids)} tokens do not fit a context of {max_model_len}")
        vocab_size += min(start.num_added_tokens, self._num_extra_tokens)
        if ids.max() >= vocab_size:
            raise SlotError(f"token id {ids.max()} is outside of the vocabulary of {vocab_size}")
        if not 0 <= start.num_computed < len(ids):
            raise SlotError(f"{start.num_computed} of {len(ids)} tokens cannot be computed already")
        if not start.num_virtual_tokens < start.num_prompt_tokens <= len(ids):
            raise SlotError(f"{start.num_prompt_tokens} of {len(ids)} tokens cannot be the prompt")
        self.token_ids[slot, : len(ids)] = ids
        self.num_tokens[slot] = self.num_known[slot] = self.num_start_tokens[slot] = len(ids)
        self.num_computed[slot], self.num_blocks[slot] = start.num_computed, 0
        self.owners[slot] = next(self._starts)
        self._append_blocks(slot, start.blocks)
        if start.num_computed > len(start.blocks) * self.block_size:
            raise SlotError(f"{len(start.blocks)} blocks cannot hold {start.num_computed} computed tokens")
        self.slots[slot] = Slot(
            start.sampling,
            start.choice,
            start.num_prompt_tokens,
            min(start.num_prompt_tokens + start.sampling.max_tokens, max_model_len),
            start.prompt_logprobs_from,
            frozenset(start.sampling.stop_token_ids),
            start.pooled,
            start.num_virtual_tokens,
            vocab_size,
        )
        if start.adapter_place is not None:
            self.adapter_places[slot] = start.adapter_place
            self.num_adapted += 1
        if start.num_virtual_tokens:
            self.num_virtual[slot] = start.num_virtual_tokens
            self.num_prompted += 1
        self.live[slot] = True

    def _append_blocks(self, slot: int, blocks: list[int]) -> None:
        num_blocks = self._limits[2]
        have = int(self.num_blocks[slot])
        blocks = blocks[: self.tables.shape[1] - have]  # blocks beyond max_model_len are not used
        if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
            raise SlotError(f"blocks {blocks} are outside of the pool of {num_blocks}")
        self.tables[slot, have : have + len(blocks)] = blocks
        self.num_blocks[slot] = have + len(blocks)
