"""Frames that a step sends: to workers, gateways and detokenizers."""

import enum
from array import array
from typing import NamedTuple, Protocol

from blockyard.shared.messages import (
    Cancel,
    Frame,
    SlotResult,
    StepPlan,
    StreamOpen,
    TokenBatch,
    TokenRows,
    TokenStep,
    VectorBatch,
    VectorBlock,
    VectorFailure,
)

FLOAT_BYTES = 4


class LinkSide(enum.Enum):
    OURS = enum.auto()  # the link that this process opened
    PEERS = enum.auto()  # the link that the peer opened


class Outgoing(NamedTuple):
    side: LinkSide
    to: int  # incarnation
    frame: Frame


class Outbox:
    """The frames of one step. Plans are sent first, because workers wait for them."""

    def __init__(self) -> None:
        self._before_plans: list[Outgoing] = []
        self._plans: list[Outgoing] = []
        self._frames: list[Outgoing] = []  # in order

    def plan(self, worker: int, plan: StepPlan) -> None:
        """The only frame that this worker gets in this step."""
        self._plans.append(Outgoing(LinkSide.OURS, worker, plan))

    def send_before_plans(self, to: int, frame: Frame) -> None:
        """For a frame that one worker must have before another worker has its plan."""
        self._before_plans.append(Outgoing(LinkSide.OURS, to, frame))

    def send(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(LinkSide.OURS, to, frame))

    def answer(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(LinkSide.PEERS, to, frame))

    def take(self) -> list[Outgoing]:
        frames = self._before_plans + self._plans + self._frames
        self._before_plans, self._plans, self._frames = [], [], []
        return frames


class PoolAddress(Protocol):
    """Where results of a request with many prompts go: it may be sent again, by another gateway."""

    id: str
    attempt: int
    gateway: int


class _Block:
    """The results of one step for one request with many prompts."""

    def __init__(self) -> None:
        self.indexes, self.lengths = array("I"), array("I")
        self.data: list[bytes] = []
        self.cached_tokens = array("I")
        self.width = 0
        self.queued_s = 0.0
        self.failures: list[VectorFailure] = []

    def frame(self, pool: PoolAddress) -> VectorBlock:
        columns = (self.indexes.tobytes(), self.lengths.tobytes(), b"".join(self.data))
        cached = self.cached_tokens.tobytes() if any(self.cached_tokens) else b""
        return VectorBlock(pool.id, pool.attempt, *columns, self.width, cached, self.failures, self.queued_s)


class HasVector(Protocol):
    """The part of a sequence that a block of results has."""

    index: int
    queued_s: float | None

    @property
    def reported_cached_tokens(self) -> int: ...


class VectorOutbox:
    """The vectors of one step: one frame for each gateway, on the link that its requests came by."""

    def __init__(self) -> None:
        self._blocks: dict[PoolAddress, _Block] = {}

    def add(self, pool: PoolAddress, sequence: HasVector, slot: SlotResult) -> None:
        """The result of one prompt."""
        block = self._block(pool)
        block.indexes.append(sequence.index)
        block.lengths.append(len(slot.vector) // FLOAT_BYTES)
        block.data.append(slot.vector)
        block.width = slot.width
        block.cached_tokens.append(sequence.reported_cached_tokens)
        block.queued_s = max(block.queued_s, sequence.queued_s or 0.0)

    def add_block(
        self, pool: PoolAddress, indexes: "array[int]", lengths: bytes, data: bytes, width: int, queued_s: float
    ) -> None:
        """The results of many prompts of a model without KV, as they came from the worker."""
        block = self._block(pool)
        block.indexes += indexes
        block.lengths.frombytes(lengths)
        block.data.append(data)
        block.width = width
        block.queued_s = max(block.queued_s, queued_s)

    def fail(self, pool: PoolAddress, index: int, detail: str, status: int) -> None:
        """A prompt has no result."""
        self._block(pool).failures.append(VectorFailure(index, detail, status))

    def _block(self, pool: PoolAddress) -> _Block:
        block = self._blocks.get(pool)
        if block is None:
            block = self._blocks[pool] = _Block()
        return block

    def flush(self, outbox: Outbox) -> None:
        if not self._blocks:
            return
        by_gateway: dict[int, list[VectorBlock]] = {}
        for pool, block in self._blocks.items():
            by_gateway.setdefault(pool.gateway, []).append(block.frame(pool))
        for gateway, blocks in by_gateway.items():
            outbox.answer(gateway, VectorBatch(blocks))
        self._blocks.clear()


class DetokenizerOutbox:
    """Frames that a step sends to one live detokenizer."""

    __slots__ = ("_batches", "_closes", "_opens", "_rows", "_stamp_s", "_steps", "incarnation", "num_streams")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.num_streams = 0  # open ones
        self._opens: list[StreamOpen] = []
        self._rows: list[TokenRows] = []
        self._steps: list[TokenStep] = []
        self._closes: list[Cancel] = []
        self._stamp_s = 0.0  # of two results in one step the older time counts, so that no latency is hidden
        self._batches: list[TokenBatch] = []

    def open_streams(self, opens: list[StreamOpen]) -> None:
        self._opens += opens
        self.num_streams += len(opens)

    def close_streams(self, closes: list[Cancel], num_streams: int = 0) -> None:
        """`num_streams`: how many of the streams counted here this closes."""
        self._closes += closes
        self.num_streams -= num_streams

    def on_stream_ended(self) -> None:
        """The detokenizer closes a stream by itself after its last token."""
        self.num_streams -= 1

    def add_rows(self, rows: TokenRows, stamp_s: float) -> None:
        """`stamp_s`: when the tokens were sampled, by the worker's clock."""
        self._rows.append(rows)
        if not self._stamp_s:
            self._stamp_s = stamp_s

    def add_step(self, step: TokenStep, stamp_s: float = 0.0) -> None:
        """`stamp_s` as for `add_rows`; 0 for a step without new tokens."""
        self._steps.append(step)
        if not self._stamp_s:
            self._stamp_s = stamp_s

    def end_batch(self) -> None:
        """Starts a new batch: within one, the detokenizer reads rows before steps."""
        if self._opens or self._rows or self._steps or self._closes:
            self._batches.append(TokenBatch(self._opens, self._steps, self._closes, self._stamp_s, self._rows))
            self._opens, self._rows, self._steps, self._closes, self._stamp_s = [], [], [], [], 0.0

    def flush(self, outbox: Outbox) -> None:
        self.end_batch()
        for batch in self._batches:
            outbox.send(self.incarnation, batch)
        self._batches = []
