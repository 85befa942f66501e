"""A strict gateway and detokenizer: they assert that each frame fits their state."""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from token_rows import steps_of

from blockyard.shared.messages import (
    Accepted,
    Cancel,
    ChoiceState,
    Controlled,
    FinishReason,
    Frame,
    Generate,
    PathLost,
    Pool,
    Refused,
    Sampling,
    Stop,
    StreamOpen,
    StreamRef,
    TextOptions,
    TokenBatch,
    TokenLogprobs,
    TokenStep,
    VectorBatch,
)

from .fake_pools import PoolJournal


def ids_bytes(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def ids_list(data: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


@dataclass
class Output:
    """The output of a choice in the gateway's journal."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    finish: FinishReason | None = None
    detail: str = ""
    num_cached_tokens: int | None = None  # from the first step of the first attempt


@dataclass
class Journal:
    frame: Generate
    outputs: dict[int, Output]
    detokenizer: int | None = None  # of the current attempt, once accepted
    refused: Refused | None = None
    cancelled: bool = False

    def open(self) -> list[int]:
        if self.cancelled or self.refused is not None:
            return []
        return [i for i, out in self.outputs.items() if out.finish is None]


@dataclass
class FakeGateway:
    incarnation: int
    journals: dict[str, Journal] = field(default_factory=dict)
    capacities: list[Frame] = field(default_factory=list)
    controlled: list[Controlled] = field(default_factory=list)
    vectors: list[VectorBatch] = field(default_factory=list)
    pools: dict[str, PoolJournal] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # requests to be sent again, from PathLost

    def new(
        self, request_id: str, prompt: list[int], sampling: Sampling, n: int, names: bytes = b"", **more: object
    ) -> Generate:
        choices = [ChoiceState(i) for i in range(n)]
        frame = Generate(request_id, 0, "m", ids_bytes(prompt), names, sampling, TextOptions(), choices, **more)
        self.journals[request_id] = Journal(frame, {i: Output() for i in range(n)})
        return frame

    def again(self, request_id: str) -> Generate | Pool:
        """The same request with the next attempt and the ids received so far."""
        if request_id in self.pools:
            return self.pools[request_id].again()
        journal = self.journals[request_id]
        old = journal.frame
        choices = [
            ChoiceState(i, ids_bytes(journal.outputs[i].ids), len(journal.outputs[i].ids)) for i in journal.open()
        ]
        journal.frame = msgspec.structs.replace(old, attempt=old.attempt + 1, choices=choices)
        journal.detokenizer = None
        return journal.frame

    def take(self, frame: Frame) -> None:
        """Handles an answer of the scheduler."""
        if isinstance(frame, Controlled):
            self.controlled.append(frame)
            return
        if isinstance(frame, VectorBatch):
            self.vectors.append(frame)
            for block in frame.blocks:
                self.pools[block.request_id].read(block)
            return
        if isinstance(frame, PathLost):
            is_ours = frame.member == self.incarnation
            self.lost.update([*self.journals, *self.pools] if is_ours else self.through(frame.member))
            return
        if not isinstance(frame, Accepted | Refused):
            self.capacities.append(frame)
            return
        if (pool := self.pools.get(frame.request_id)) is not None:
            if frame.attempt == pool.frame.attempt:
                self._answer(pool, frame)
            return
        journal = self.journals[frame.request_id]
        if frame.attempt != journal.frame.attempt:
            return
        if isinstance(frame, Refused):
            assert journal.refused is None, f"{frame.request_id} was refused twice"
            journal.refused = frame
        else:
            assert journal.refused is None
            journal.detokenizer = frame.detokenizer

    def _answer(self, pool: PoolJournal, frame: Accepted | Refused) -> None:
        if isinstance(frame, Refused):
            assert pool.refused is None and not pool.num_accepted, f"{frame.request_id} was answered twice"
            pool.refused = frame
        else:
            assert pool.refused is None and frame.detokenizer is None
            pool.num_accepted += 1

    def through(self, detokenizer: int) -> list[str]:
        """Open requests with this detokenizer."""
        return [name for name, j in self.journals.items() if j.detokenizer == detokenizer and j.open()]

    def take_lost(self) -> list[str]:
        lost, self.lost = self.lost, set()
        texts = [name for name, journal in self.journals.items() if name in lost and journal.open()]
        return texts + [name for name, pool in self.pools.items() if name in lost and pool.is_open()]

    def read(self, step: TokenStep) -> None:
        """Handles a delta of a detokenizer."""
        journal = self.journals[step.request_id]
        if step.attempt != journal.frame.attempt or journal.cancelled:
            return
        out = journal.outputs[step.choice]
        assert journal.refused is None, f"text of {step.request_id}, which was refused"
        assert out.finish is None, f"{step.request_id}/{step.choice} ended {out.finish} and again: {step}"
        assert step.first == len(out.ids), f"{step.request_id}/{step.choice} has {len(out.ids)} ids, got {step}"
        if out.num_cached_tokens is None:
            out.num_cached_tokens = step.cached_tokens
        else:
            assert not step.cached_tokens or journal.frame.attempt, "cached tokens are said once"
        out.ids += step.token_ids
        out.logprobs += step.logprobs
        for i, logprob in enumerate(step.prompt_logprobs):
            out.prompt_logprobs[step.first_prompt + i] = logprob
        out.finish, out.detail = step.finish, step.detail


@dataclass
class Stream:
    attempt: int
    gateway: int
    num_ids: int


@dataclass
class FakeDetokenizer:
    incarnation: int
    stops: Callable[[TokenStep], bool]  # whether a stop string ends with this step
    streams: dict[tuple[str, int], Stream] = field(default_factory=dict)
    called: dict[int, StreamOpen] = field(default_factory=dict)  # all streams so far, by the scheduler's number
    inbox: deque[TokenBatch] = field(default_factory=deque)
    ended: set[tuple[str, int, int]] = field(default_factory=set)  # streams of an attempt that the scheduler ended
    num_rows: int = 0
    lost_frames: bool = False  # the lost frames may contain closes

    def work(self, read: Callable[[int, TokenStep], None]) -> list[Stop]:
        """Handles one batch: calls `read` for each delta, and returns the Stop frames for the scheduler."""
        if not self.inbox:
            return []
        batch = self.inbox.popleft()
        for new in batch.opens:
            old = self.streams.get((new.request_id, new.choice))
            if old is None or old.attempt < new.attempt:
                num_ids = len(ids_list(new.output_ids))
                self.streams[new.request_id, new.choice] = Stream(new.attempt, new.gateway, num_ids)
        steps = steps_of(batch, self.called)
        self.num_rows += len(steps) - len(batch.steps)
        found = [ref for step in steps if (ref := self._step(step, read)) is not None]
        for close in batch.closes:
            self._close(close)
        return [Stop(found)] if found else []

    def forget(self, gateway: int) -> None:
        """Drops the streams of a gateway that it cannot send to."""
        self.streams = {key: stream for key, stream in self.streams.items() if stream.gateway != gateway}

    def _step(self, step: TokenStep, read: Callable[[int, TokenStep], None]) -> StreamRef | None:
        stream = self.streams.get((step.request_id, step.choice))
        name = (step.request_id, step.attempt, step.choice)
        assert name not in self.ended, f"{step} comes after the end of its stream"
        if stream is None or stream.attempt != step.attempt:
            return None
        assert step.first == stream.num_ids, f"stream has {stream.num_ids} ids, got {step}"
        stream.num_ids += len(step.token_ids)
        if step.finish is None and step.token_ids and self.stops(step):
            stopped = msgspec.structs.replace(step, finish=FinishReason.STOP)
            read(stream.gateway, stopped)
            del self.streams[step.request_id, step.choice]
            return StreamRef(step.request_id, step.attempt, step.choice)
        read(stream.gateway, step)
        if step.finish is not None:
            self.ended.add(name)
            del self.streams[step.request_id, step.choice]
        return None

    def _close(self, close: Cancel) -> None:
        for key in [k for k, s in self.streams.items() if k[0] == close.request_id and s.attempt <= close.attempt]:
            del self.streams[key]
