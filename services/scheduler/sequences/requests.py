"""What the scheduler knows of a request, its choices, and the seats they take in a worker's batch."""

import enum
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from blockyard.services.scheduler.kv_cache.block_table import BlockTable
from blockyard.services.scheduler.kv_cache.id_pool import PlanClock
from blockyard.services.scheduler.sequences.beam_search import BeamSearch, Hypothesis
from blockyard.services.scheduler.sequences.detokenizer_outbox import DetokenizerOutbox
from blockyard.shared.messages import Generate, Sampling, SlotRun

ID_BYTES = 4  # of a token id on the wire

Key = tuple[int, ...]  # the smallest is served first and preempted last


def num_ids(ids: bytes) -> int:
    return len(ids) // ID_BYTES


class Phase(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class QueueAmount(NamedTuple):
    """How much waits, or is to wait."""

    sequences: int = 0
    tokens: int = 0  # known ones of all these choices

    def plus(self, other: "QueueAmount") -> "QueueAmount":
        return QueueAmount(self.sequences + other.sequences, self.tokens + other.tokens)

    def less(self, other: "QueueAmount") -> "QueueAmount":
        return QueueAmount(self.sequences - other.sequences, self.tokens - other.tokens)


NO_AMOUNT = QueueAmount()


class TokenAccount(Protocol):
    """Who pays for what a request is served, where that is counted."""

    def charge(self, num_outputs: int) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. `choices` holds those that have not ended; the request ends with the last of them."""

    id: str
    attempt: int
    frame: Generate  # of the highest attempt
    gateway: int  # incarnation
    arrival: int
    num_prompt: int
    sequences: dict[int, "Sequence"] = field(default_factory=dict)
    text_outbox: DetokenizerOutbox | None = None  # None while no live detokenizer has its streams
    detokenizer: int = 0  # the one that has or last had them; 0: none yet
    accepted: bool = False
    awaiting_prompt: list["Sequence"] = field(
        default_factory=list
    )  # members that begin when another has written the prompt

    account: TokenAccount | None = None
    arrival_s: float = 0.0
    owner: tuple[str, str] = ("", "")  # tenant, and user of it: those of the first attempt
    search: "ActiveBeamSearch | None" = None

    def add_sequences(self, sequences: list["Sequence"]) -> None:
        self.sequences |= {sequence.index: sequence for sequence in sequences}

    def set_accepted(self) -> None:
        self.accepted = True

    def set_account(self, account: TokenAccount) -> None:
        self.account = account

    def rebind(self, frame: Generate, gateway: int) -> None:
        """A gateway has sent the request again. It is to be accepted again."""
        self.attempt, self.frame, self.gateway, self.accepted = frame.attempt, frame, gateway, False

    @property
    def has_fixed_length(self) -> bool:
        """Its choices end with `max_tokens` and not before."""
        sampling = self.frame.sampling
        return sampling.ignore_eos and not sampling.stop_token_ids and not self.frame.text.stop

    @property
    def active_sequences(self) -> Collection["Sequence"]:
        """What runs and waits for it."""
        return self.sequences.values() if self.search is None else self.search.beam_scheduler


@dataclass(slots=True, eq=False)
class ActiveBeamSearch:
    """A beam search: `choices` are its live hypotheses, those of the request what it will be answered with."""

    steps: BeamSearch
    beam_scheduler: list["Sequence"]
    num_cached_tokens: int = 0  # prompt tokens that the first one found
    queued_s: float | None = None  # how long the first one waited for its seat
    stalled: dict[int, int] = field(default_factory=dict)  # by worker: last plan sent when none of it could run there

    def sampling(self, asked: Sampling, eos: list[int]) -> Sampling:
        """For the worker, which draws a token that may not be the one taken, and ends nothing."""
        return msgspec.structs.replace(
            asked,
            max_tokens=asked.max_tokens + 1,
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[],
            num_logprobs=max(self.steps.width + len(self.steps.ends(eos)), asked.num_logprobs or 0),
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation: the tokens that are known of it. What is granted of it is its seat's affair."""

    request: Request
    index: int
    outputs: "array[int]"
    phase: Phase = Phase.WAITING
    key: Key = ()  # of the seat it has or had last
    ticket: int = 0  # its entry in the waiting queue, 0: none
    is_held: bool = False  # it waits at a group's desk
    num_beams: int = 1  # choices that it counts as while it waits: the first of a beam search is all of its beams
    queue_amount: QueueAmount = NO_AMOUNT  # what it is in the waiting queue's ledger, parked or not
    last_run: "RunningSequence | None" = (
        None  # the one it runs in, or, while it waits, the last one: its results may be out still
    )
    prompt_next: int = 0  # the first prompt position whose log-probabilities have not come; they are not kept
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    hash_block_size: int = 0  # tokens of the blocks that are named; 0: nobody asked
    num_cached_tokens: int | None = None  # prompt tokens found when it first got a seat
    queued_s: float | None = None  # how long its request had waited when it first got a seat
    reports_cached: bool = True  # false: an earlier attempt had a seat elsewhere, and this one finds what that computed
    hypothesis: Hypothesis | None = None  # of a beam search
    prompt_source: "RunningSequence | None" = None  # has computed all its tokens but the last
    stream: int = 0  # what its detokenizer knows it by, 0: it has none

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and outputs."""
        return self.request.num_prompt + len(self.outputs)

    @property
    def reported_cached_tokens(self) -> int:
        """For the step that has its first token."""
        return self.num_cached_tokens or 0 if self.reports_cached else 0

    def on_queued(self, ticket: int, is_held: bool) -> None:
        self.ticket, self.is_held = ticket, is_held

    def on_dequeued(self) -> None:
        self.ticket, self.is_held = 0, False

    def set_queue_amount(self, amount: QueueAmount) -> None:
        self.queue_amount = amount

    def clear_queue_amount(self) -> None:
        """From now on the sequence stands for itself alone."""
        self.queue_amount, self.num_beams = NO_AMOUNT, 1

    def set_block_hashes(self, block_size: int, hashes: list[bytes]) -> None:
        self.hash_block_size, self.block_hashes = block_size, hashes

    def awaits_results(self) -> bool:
        """Left its seat while plans with it were in flight: what they say are its tokens still."""
        running = self.last_run
        return running is not None and running.last_plan > running.plan_clock.last_completed


class SharedProgress:
    """What all seats of a lane have in common."""

    __slots__ = ("last_plan", "num_scheduled_tokens")

    def __init__(self) -> None:
        self.num_scheduled_tokens = 0  # tokens a seat
        self.last_plan = 0


NOT_SHARED = SharedProgress()  # of a seat in no lane; never moves


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A choice in a slot of a worker's batch. Positions here are counts of tokens of prompt and outputs.

    What changes with every step is not written down for each seat, or a step would cost as much as there are seats:
    see batch/decode_batch.py.
    """

    sequence: Sequence
    worker: int  # incarnation
    plan_clock: PlanClock
    slot: int
    key: Key
    prefill_end: int  # ids it started with
    max_num_tokens: int  # known tokens at which it ends: max_tokens or the model's length
    max_scheduled_tokens: int
    table: BlockTable
    decode: SlotRun  # the same in every plan
    progress: SharedProgress = NOT_SHARED  # its lane's
    has_sampled: bool = False  # a token has come: from then on all that is known but the last one is computed
    batch_row: int = 0  # its place in its lane
    due_step: int = 0  # when its lane looks at it, by its pace
    own_tokens: int = 0  # tokens granted besides its lane's
    _computed: int = 0  # until a token is drawn
    _last_plan: int = 0  # before its lane's

    @property
    def num_scheduled_tokens(self) -> int:
        """How many tokens have KV at most, once all plans in flight have run.

        It goes past what is known, because a sampled token feeds the next step on the device, and never past `ceiling`.
        """
        return self.own_tokens + self.progress.num_scheduled_tokens

    @num_scheduled_tokens.setter
    def num_scheduled_tokens(self, num_tokens: int) -> None:
        self.own_tokens = num_tokens - self.progress.num_scheduled_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens with KV as of the last result."""
        return self.sequence.num_tokens - 1 if self.has_sampled else self._computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        self._computed = num_tokens

    @property
    def last_plan(self) -> int:
        """Number of the last plan it runs in."""
        return max(self._last_plan, self.progress.last_plan)

    @last_plan.setter
    def last_plan(self, number: int) -> None:
        self._last_plan = number

    def share_progress(self, progress: SharedProgress) -> None:
        """Goes on at this pace, from where it is."""
        self._last_plan = self.last_plan
        self.own_tokens += self.progress.num_scheduled_tokens - progress.num_scheduled_tokens
        self.progress = progress


def make_sequence(request: Request, index: int, output_ids: bytes, num_cached_tokens: int | None = None) -> Sequence:
    """A choice that goes on after `output_ids`; if there are any, its prompt's log-probabilities came before them.

    `num_cached_tokens`: what an earlier attempt found of its prompt, if that is known.
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
