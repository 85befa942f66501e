"""Runs one call of a pooling method: asks the ring for some texts at a time."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from blockyard.services.offline.batch import BatchProgress
from blockyard.services.offline.pooling.params import CheckedPooling
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PooledText, PoolingCall, PoolingInput
from blockyard.shared.ring_client.pooling.pair_scores import Pairs, score_pairs
from blockyard.shared.token_ids import unpack

T = TypeVar("T")
Make = Callable[[str, PooledText, list[int]], T]  # of the output's id, the result and the ids of the input

PART = 1024  # inputs that are asked for at once
MOST_PARTS = 4  # at a time: one is tokenized while others are computed
RETRY_S = 0.2  # until a part is sent again that a full queue has refused


class InputGroup(NamedTuple):
    """What must be the same for inputs of one frame."""

    checked: CheckedPooling
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob:
    """The inputs of a call. It has `inputs` or `pairs`."""

    model: str
    groups: Sequence[InputGroup]  # of each input or pair
    inputs: Sequence[PoolingInput] = ()
    pairs: Pairs | None = None
    compares: bool = False  # as in `score_pairs`
    field: str = "prompts"
    is_single: bool = False
    prompt_name: str | None = None
    add_special_tokens: bool = True
    priority: int = 0


class PoolingBatch(Generic[T]):
    """`run` returns when every input has its output, in `outputs`. Runs on the ring's event loop.

    Outputs of a part are made while the ring computes others.
    """

    def __init__(self, name: str, job: PoolingJob, client: RingClient, make: Make[T]) -> None:
        self.progress = BatchProgress()
        self.outputs: list[T] = []
        self._name, self._job, self._client, self._make = name, job, client, make
        self._running: asyncio.Task[None] | None = None
        self._error: RequestError | None = None

    async def run(self) -> None:
        """Raises RequestError, with the name of the input that is wrong. The other parts are then dropped."""
        self._running = asyncio.create_task(self._run_parts())
        try:
            await self._running
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise

    def abort(self, error: RequestError) -> None:
        """Ends the call with this error."""
        if self._running is not None and not self._running.done():
            self._error = error
            self._running.cancel()

    async def _run_parts(self) -> None:
        self.progress.on_begin(self._client.clock())
        free = asyncio.Semaphore(MOST_PARTS)
        found: dict[int, list[T]] = {}
        parts = list(self._parts())
        tasks = [asyncio.create_task(self._run_part(part, free, found)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        for part in parts:
            self.outputs += found[part.start]

    async def _run_part(self, part: range, free: asyncio.Semaphore, found: dict[int, list[T]]) -> None:
        async with free:
            answer = await self._ask(part)
        named = enumerate(answer.items, part.start)
        found[part.start] = [self._make(f"{self._name}-{i}", item, unpack(item.token_ids)) for i, item in named]
        self.progress.add_prompt_tokens(answer.num_tokens)
        for _ in part:
            self.progress.on_finish(self._client.clock())

    async def _ask(self, part: range) -> PooledAnswer:
        """Asks again while the queue is full."""
        call, attempt = self._call(part), 0
        while True:
            try:
                named = replace(call, request_id=f"{call.request_id}-{attempt}")
                return await self._send(named, part)
            except RequestError as e:
                if e.status != 429:
                    raise _named(e, part.start) from e
                await asyncio.sleep(e.retry_after_s or RETRY_S)
            attempt += 1

    async def _send(self, call: PoolingCall, part: range) -> PooledAnswer:
        job = self._job
        if job.pairs is None:
            return await self._client.pooling.pool(replace(call, inputs=job.inputs[part.start : part.stop]))
        firsts = job.pairs.firsts if len(job.pairs.firsts) == 1 else job.pairs.firsts[part.start : part.stop]
        pairs = replace(job.pairs, firsts=firsts, seconds=job.pairs.seconds[part.start : part.stop])
        return await score_pairs(self._client.pooling, call, pairs, job.compares)

    def _call(self, part: range) -> PoolingCall:
        job, (checked, salt) = self._job, self._job.groups[part.start]
        return PoolingCall(
            request_id=f"{self._name}-{part.start}",
            model=job.model,
            inputs=(),
            params=checked.params,
            truncate_prompt_tokens=checked.truncate,
            truncation_side=checked.truncation_side,
            add_special_tokens=job.add_special_tokens,
            prompt_name=job.prompt_name,
            instruction=checked.instruction,
            priority=job.priority,
            cache_salt=salt,
            field=job.field,
            is_single=job.is_single,
        )

    def _parts(self) -> Iterator[range]:
        """Neighbours that may share a frame, at most PART of them."""
        first = 0
        for _, group in groupby(self._job.groups):
            end = first + len(list(group))
            for start in range(first, end, PART):
                yield range(start, min(start + PART, end))
            first = end


def _named(error: RequestError, by: int) -> RequestError:
    """The error with the input it is about, whose place in the whole call is `by` behind that in its part."""
    field = error.field
    name, bracket, rest = field.rpartition("[")
    if by and bracket and rest[:-1].isdecimal():
        field = f"{name}[{int(rest[:-1]) + by}]"
    text = str(error).replace(error.field, field) if error.field else str(error)
    if field not in text:
        text = f"{field}: {text}"
    return RequestError(text, field, error.status, error.code, error.retry_after_s, error.too_long)
