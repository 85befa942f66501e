"""Requests, the sequences that are run for them, and the state of a sequence while it is in a running batch.

A field that one part alone writes is written there: of the waiting queue, streams, handovers, or hashes. Where several
values change together, or a later change must not happen, there is a method.
"""

import enum
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from blockyard.services.scheduler.outbox import DetokenizerOutbox
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.services.scheduler.sequences.beam_search import BeamSearch, Hypothesis
from blockyard.services.scheduler.sequences.handover import Handover
from blockyard.services.scheduler.sequences.packed_texts import PackedTexts
from blockyard.services.scheduler.sequences.transfer_params import TransferParams
from blockyard.shared.messages import AddedToken, Generate, PooledStart, Sampling, SlotRun

NEVER = 1 << 62  # more tokens than any sequence has

Key = tuple[int, ...]  # the smallest is scheduled first and preempted last


class Phase(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ARRIVING = enum.auto()  # its prompt is computed in one group, and its blocks are on their way to another
    ENDED = enum.auto()


class QueueAmount(NamedTuple):
    """A number of sequences, of the tokens in all of them, and of entries: what --max-queue-len bounds.

    A sequence is an entry of its own. The prompts of a `Pool` are one entry in all.
    """

    sequences: int = 0
    tokens: int = 0
    entries: int = 0

    def plus(self, other: "QueueAmount") -> "QueueAmount":
        return QueueAmount(self.sequences + other.sequences, self.tokens + other.tokens, self.entries + other.entries)

    def less(self, other: "QueueAmount") -> "QueueAmount":
        return QueueAmount(self.sequences - other.sequences, self.tokens - other.tokens, self.entries - other.entries)


NO_AMOUNT = QueueAmount()


class TokenAccount(Protocol):
    """Counts the tokens served to a user, under the fair policy."""

    def charge(self, num_outputs: int) -> None: ...


class PoolMembership(Protocol):
    """The part of `PooledRequest` that one of its prompts calls."""

    id: str
    finds_prefix: bool
    is_later: bool
    requests: "dict[int, Request]"  # by index: the ones without a result

    def on_ended(self, index: int) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. An ended sequence is removed from `sequences`; the request ends with the last one."""

    id: str
    attempt: int
    frame: Generate  # of the highest attempt
    gateway: int  # incarnation
    arrival: int
    num_prompt: int
    sequences: dict[int, "Sequence"] = field(default_factory=dict)  # by choice index
    text_outbox: DetokenizerOutbox | None = None  # None while no live detokenizer has its streams
    detokenizer: int = 0  # incarnation of the current or last one; 0: none yet
    accepted: bool = False
    awaiting_prompt: list["Sequence"] = field(default_factory=list)  # start once another one has computed the prompt

    account: TokenAccount | None = None
    arrival_s: float = 0.0
    owner: tuple[str, str] = ("", "")  # tenant and user, of the first attempt
    search: "ActiveBeamSearch | None" = None
    is_batch_line: bool = False  # every online request comes before it
    pool: "PoolMembership | None" = None  # of one prompt of many: what they have in common
    pooled: PooledStart | None = None  # how its vector is made
    texts: PackedTexts | None = None  # of a model without KV: all prompts of the request, as one sequence
    adapter: int | None = None  # number of its LoRA adapter
    prompt_adapter: int | None = None  # number of its prompt adapter ...
    num_virtual: int = 0  # ... and how many tokens of `num_prompt` are its virtual tokens, before the client's
    transfer_params: TransferParams | None = None
    num_added: int = 0  # ids behind the vocabulary, which its LoRA adapter adds ...
    added_tokens: list[AddedToken] = field(default_factory=list)  # ... and their texts, for the detokenizer

    @property
    def adapters(self) -> tuple[int, ...]:
        """Numbers of its adapters, in the order of `adapter_waits.first_lacking`."""
        return tuple(one for one in (self.prompt_adapter, self.adapter) if one is not None)

    @property
    def has_fixed_length(self) -> bool:
        """Whether its sequences end with `max_tokens` and never before."""
        sampling = self.frame.sampling
        text = self.frame.text
        return text is None or (sampling.ignore_eos and not sampling.stop_token_ids and not text.stop)

    @property
    def has_text(self) -> bool:
        """Whether it needs a detokenizer. The result of other requests is a vector, which goes to the gateway."""
        return self.frame.text is not None

    def reported(self, num_cached_tokens: int) -> int:
        """Cached tokens that are the client's."""
        return max(0, num_cached_tokens - self.num_virtual)

    @property
    def finds_prefix(self) -> bool:
        """Whether leading tokens that are cached need not be computed."""
        if self.pool is not None:
            return self.pool.finds_prefix
        return self.frame.sampling.num_prompt_logprobs is None  # which need the whole prompt's forward pass

    @property
    def active_sequences(self) -> Collection["Sequence"]:
        """The sequences that run or wait: with beam search the beams, otherwise one for each choice."""
        return self.sequences.values() if self.search is None else self.search.beams

    def add_sequences(self, sequences: list["Sequence"]) -> None:
        self.sequences |= {sequence.index: sequence for sequence in sequences}

    def remove_sequence(self, sequence: "Sequence") -> None:
        del self.sequences[sequence.index]
        if self.text_outbox is not None:
            self.text_outbox.on_stream_ended()

    def rebind(self, frame: Generate, gateway: int) -> None:
        """A gateway has sent the request again. It is to be accepted again."""
        self.attempt, self.frame, self.gateway, self.accepted = frame.attempt, frame, gateway, False

    def set_detokenizer(self, text_outbox: DetokenizerOutbox | None) -> None:
        """None: its streams are lost or closed."""
        self.text_outbox = text_outbox
        if text_outbox is not None:
            self.detokenizer = text_outbox.incarnation

    def take_awaiting_prompt(self) -> list["Sequence"]:
        sequences, self.awaiting_prompt = self.awaiting_prompt, []
        return sequences


@dataclass(slots=True, eq=False)
class ActiveBeamSearch:
    """A beam search in progress. The request's own sequences are only the choices that it will answer with."""

    steps: BeamSearch
    beams: list["Sequence"]
    num_cached_tokens: int = 0  # prompt tokens that the first beam found
    queued_s: float | None = None  # how long the first beam waited
    stalled: dict[int, int] = field(default_factory=dict)  # by worker: last plan sent when no beam could run there

    def sampling(self, asked: Sampling, eos: list[int]) -> Sampling:
        """For the worker: it returns the likeliest tokens, and its own token and its end conditions do not count."""
        return msgspec.structs.replace(
            asked,
            max_tokens=asked.max_tokens + 1,
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[],
            num_logprobs=max(self.steps.num_candidates(eos), asked.num_logprobs or 0),
        )

    def on_step(self, last: "Sequence") -> None:
        """All beams are computed; `last` is the beam of the last result."""
        self.num_cached_tokens = max(self.num_cached_tokens, last.num_cached_tokens or 0)
        self.queued_s = last.queued_s if self.queued_s is None else self.queued_s

    def replace_beams(self, beams: list["Sequence"]) -> list["Sequence"]:
        """Returns the previous ones."""
        before, self.beams = self.beams, beams
        return before


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one choice, or of one beam. Its state in a running batch is its `RunningSequence`."""

    request: Request
    index: int  # of the choice
    outputs: "array[int]"
    phase: Phase = Phase.WAITING
    key: Key = ()  # of its current or last run
    ticket: int = 0  # its entry in the waiting queue; 0: none
    is_set_aside: bool = False  # it waits, but outside the queue's order: in a group's queue, or deferred
    num_beams: int = 1  # sequences that it counts as while it waits: the first beam counts as all beams
    queue_amount: QueueAmount = NO_AMOUNT  # what the waiting queue counts for it
    last_run: "RunningSequence | None" = None  # while it waits, results of its last run may be outstanding
    prompt_next: int = 0  # first prompt position without log-probabilities; they are sent on and not kept
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    hash_block_size: int = 0  # block size of `block_hashes`; 0: none were needed
    num_cached_tokens: int | None = None  # prompt tokens found when it first ran
    queued_s: float | None = None  # how long its request had waited when it first ran
    reports_cached: bool = True  # False after an earlier attempt elsewhere, which may have filled the cache itself
    hypothesis: Hypothesis | None = None  # of a beam
    prompt_source: "RunningSequence | None" = None  # has computed all its tokens but the last
    stream: int = 0  # its number at the detokenizer; 0: none
    handover: Handover | None = None  # to the group that decodes it, until it is seated there
    was_prefilled: bool = False  # its prompt was handed over: it may find its own blocks, whatever it asks for
    first_token_s: float | None = None  # when its first token came, after a handover and until the second token

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt + len(self.outputs)

    @property
    def amount(self) -> QueueAmount:
        """What it takes of the waiting queue while it waits. The queue counts the entry of a `Pool`."""
        if (texts := self.request.texts) is not None:
            return QueueAmount(texts.num_texts, texts.num_tokens)
        return QueueAmount(
            self.num_beams, self.num_beams * self.num_tokens, self.num_beams if self.request.pool is None else 0
        )

    @property
    def has_siblings(self) -> bool:
        """Whether it may share blocks with another sequence of its request."""
        return self.prompt_source is not None or len(self.request.active_sequences) > 1

    @property
    def num_to_place(self) -> int:
        """Sequences of its request that start where it runs: beams, and the ones that wait for its prompt."""
        return self.num_beams + len(self.request.awaiting_prompt)

    @property
    def reported_cached_tokens(self) -> int:
        """For the step that has its first token."""
        return self.request.reported(self.num_cached_tokens or 0) if self.reports_cached else 0

    def awaits_results(self) -> bool:
        """Whether plans of its last run are in flight: their tokens are still its tokens."""
        running = self.last_run
        return running is not None and running.last_plan > running.plan_clock.last_completed

    # the running batch

    def set_key(self, key: Key, now: float) -> None:
        """It is about to run with this key."""
        self.key = key
        if self.queued_s is None:
            self.queued_s = max(0.0, now - self.request.arrival_s)

    def on_running(self, running: "RunningSequence", num_cached_tokens: int) -> None:
        self.last_run, self.phase = running, Phase.RUNNING
        self.set_num_cached(min(num_cached_tokens, self.request.num_prompt))

    def on_waiting(self, is_lost: bool = False) -> None:
        """`is_lost`: no results of its last run will come."""
        self.phase = Phase.WAITING
        if is_lost:
            self.last_run = None

    def on_prefilled(self, now: float | None) -> None:
        """Its prompt and first token are computed, and it has left the batch of that group."""
        self.phase, self.was_prefilled, self.first_token_s = Phase.ARRIVING, True, now

    def take_first_token_s(self) -> float | None:
        """When its first token came; None at every call but the first after a handover."""
        first_token_s, self.first_token_s = self.first_token_s, None
        return first_token_s

    def share_prefilled(self, other: "Sequence") -> None:
        """`other` has computed the prompt for both, and delivered its log-probabilities."""
        self.was_prefilled, self.prompt_next = True, max(self.prompt_next, other.prompt_next)
        self.set_num_cached(other.num_cached_tokens)

    def on_ended(self) -> None:
        """Drops references to runs, because reference cycles stay in memory while the collector is off."""
        self.phase, self.last_run, self.prompt_source = Phase.ENDED, None, None

    def set_num_cached(self, num_tokens: int | None) -> None:
        """Prompt tokens found when it first ran. Later calls change nothing."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_tokens

    # results

    def add_outputs(self, token_ids: list[int], prompt_next: int | None) -> None:
        self.outputs.extend(token_ids)
        if prompt_next is not None:
            self.prompt_next = prompt_next

    def set_hypothesis(self, hypothesis: Hypothesis) -> None:
        """A beam continues with this hypothesis. It shares no prompt with other runs any more."""
        self.hypothesis, self.outputs, self.prompt_source = hypothesis, hypothesis.outputs, None


@dataclass(slots=True, eq=False)
class BlockTable:
    """The KV blocks of a running sequence, in the order of its tokens. Written by the `KVCacheManager`.

    Entries stay when their block is given up outside the sliding window, because positions count them.
    """

    block_size: int
    blocks: list[int]
    capacity: int  # tokens
    num_cached: int  # leading blocks that were found: other sequences may have them too
    num_freed: int  # leading entries with blocks that are not held: they are outside the sliding window
    copied_from: int | None  # this block was copied into the first block that was not found
    num_hashed: int  # leading blocks that are hashed, or will be once a plan is sent
    next_hash_at: int = NEVER  # computed tokens with which the next block is full and to be hashed
    is_hash_due: bool = False  # waits in the manager's queue for its next block to be hashed

    def extend(self, blocks: list[int]) -> None:
        self.blocks += blocks
        self.capacity += len(blocks) * self.block_size

    def free_first(self, end: int) -> list[int]:
        """The blocks before entry `end` that are still held; from now on they are not."""
        first, self.num_freed = self.num_freed, end
        return self.blocks[first:end]

    def set_hashed(self, num_blocks: int) -> None:
        self.num_hashed = num_blocks
        self.next_hash_at = (num_blocks + 1) * self.block_size

    def invalidate(self) -> None:
        """The contents are wrong: no block is hashed any more."""
        self.num_hashed, self.next_hash_at = 0, NEVER

    def reads_any(self, bad: Collection[int]) -> bool:
        """Whether blocks that this sequence found, or copied from, are among `bad`."""
        return self.copied_from in bad or any(block in bad for block in self.blocks[: self.num_cached])


class SharedProgress:
    """Progress that all sequences of a decode batch share. Written by the `DecodeBatch` that made it."""

    __slots__ = ("last_plan", "num_scheduled_tokens")

    def __init__(self) -> None:
        self.num_scheduled_tokens = 0  # of each sequence, since the decode batch began
        self.last_plan = 0


NOT_SHARED = SharedProgress()  # of sequences outside a decode batch; never changes


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence in the running batch of a worker group: its slot, its blocks, and how far it is scheduled.

    Counts of tokens include the prompt. What changes with each step of a decode batch is kept in `progress`, once for
    all its sequences, so that the cost of a step does not grow with their number: see batch/decode_batch.py.
    """

    sequence: Sequence
    worker: int  # incarnation
    plan_clock: PlanClock
    slot: int
    key: Key
    prefill_end: int  # tokens that it started with
    max_num_tokens: int  # it ends with so many: prompt and max_tokens, or the model's length
    max_scheduled_tokens: int  # the last token is sampled and never computed
    table: BlockTable
    decode: SlotRun  # the same in every plan
    progress: SharedProgress = NOT_SHARED  # of its decode batch
    has_sampled: bool = False  # then all its tokens but the last are computed
    leaves_prefilled: bool = False  # once it has sampled, it goes on in another group
    own_tokens: int = 0  # scheduled tokens, added to `progress`
    num_prefilled: int = 0  # computed tokens, until it has sampled
    adapter_place: int | None = None  # of its adapter, in its group
    _last_plan: int = 0  # outside a decode batch

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens in the KV cache once all plans in flight have run.

        The count may exceed the sequence's known tokens, because a sampled token feeds the next step on the device.
        """
        return self.own_tokens + self.progress.num_scheduled_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in the KV cache as of the last result."""
        return self.sequence.num_tokens - 1 if self.has_sampled else self.num_prefilled

    @property
    def last_plan(self) -> int:
        """Number of the last plan it runs in."""
        return max(self._last_plan, self.progress.last_plan)

    def on_scheduled(self, num_tokens: int, plan: int) -> None:
        self.own_tokens += num_tokens
        self._last_plan = plan

    def set_leaves_prefilled(self) -> None:
        self.leaves_prefilled, self.max_scheduled_tokens = True, self.prefill_end

    def share_progress(self, progress: SharedProgress, plan: int = 0) -> None:
        """Joins or leaves a decode batch; its counts stay the same. `plan`: the plan that it joins with."""
        self._last_plan = max(self.last_plan, plan)
        self.own_tokens += self.progress.num_scheduled_tokens - progress.num_scheduled_tokens
        self.progress = progress


def make_sequence(request: Request, index: int, output_ids: bytes, num_cached_tokens: int | None = None) -> Sequence:
    """A sequence that continues after `output_ids`. If there are any, its prompt's log-probabilities were delivered.

    `num_cached_tokens`: prompt tokens that an earlier attempt found, if that is known.
    """
    outputs = array("I")
    outputs.frombytes(output_ids)
    return Sequence(
        request,
        index,
        outputs,
        prompt_next=request.num_prompt if outputs else 0,
        num_cached_tokens=num_cached_tokens,
        reports_cached=not request.attempt or num_cached_tokens is not None,
    )
