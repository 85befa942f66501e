"""Asks the ring for vectors, scores and classes of texts."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard, Pool
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.pooled_entry import PooledEntry
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PooledText, PoolingCall
from blockyard.shared.ring_client.pooling.params_check import check_params
from blockyard.shared.ring_client.pooling.text_jobs import TextJobs, TokenizedInputs, field_of
from blockyard.shared.ring_client.recovery.dispatch import Dispatch
from blockyard.shared.ring_client.schedulers import Schedulers
from blockyard.shared.ring_client.tokenizer_client import TokenizerClient
from blockyard.shared.token_ids import num_ids


class _SentPart(NamedTuple):
    """Inputs of a call that were sent together, because they were tokenized together."""

    inputs: TokenizedInputs
    entry: PooledEntry


class PoolingClient:
    """The part of a `RingClient` for pooling models."""

    def __init__(
        self,
        tokenizers: TokenizerClient,
        schedulers: Schedulers,
        dispatch: Dispatch,
        meters: Meters,
        clock: Callable[[], float],
    ) -> None:
        self._jobs, self._schedulers, self._dispatch = TextJobs(tokenizers), schedulers, dispatch
        self._meters, self._clock = meters, clock
        self._num_calls = 0  # without an answer
        self._open: set[PooledEntry] = set()

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the texts without a result."""
        return sum(entry.num_waiting_tokens for entry in self._open)

    async def pool(self, call: PoolingCall) -> PooledAnswer:
        """Returns the results of all inputs, in order. Cancelling it drops the request in the ring.

        Raises RequestError, with the name of the input that is wrong: `input[17]`.
        """
        arrived_s, card = self._clock(), self._schedulers.card(call.model)
        check_params(call.params, card)
        if not call.inputs:
            raise RequestError(f"`{call.field}` is empty", call.field)
        self._schedulers.check_capacity(card.names[0], arrived_s, call.tenant, call.user)
        parts: list[_SentPart] = []
        self._num_calls += 1
        try:
            await self._jobs.tokenize(
                call, card, lambda inputs: self._send(call, card, inputs, arrived_s, parts), self._num_calls == 1
            )
            self._meters.tokenized(self._clock() - arrived_s)
            await _all_done(parts)
        finally:
            self._num_calls -= 1
            for part in parts:
                self._close(part.entry)
        return PooledAnswer(card, _items(parts, len(call.inputs)))

    def _send(
        self, call: PoolingCall, card: ModelCard, inputs: TokenizedInputs, arrived_s: float, parts: list[_SentPart]
    ) -> None:
        """Sends some inputs of a call to a scheduler, and adds them to its parts. Raises RequestError, also if a part
        that was sent before has failed."""
        for part in parts:
            if part.entry.done.done():
                part.entry.done.result()
        if not parts and call.check_room is not None:
            call.check_room()
        entry = self._entry(call, card, inputs, arrived_s, len(parts))
        self._dispatch.check_hold(card.names[0], *entry.num_held)
        if not parts:
            self._meters.request_opened()
        parts.append(_SentPart(inputs, entry))
        self._dispatch.open(entry, self._clock())
        self._open.add(entry)

    def _close(self, entry: PooledEntry) -> None:
        self._open.discard(entry)
        self._dispatch.close(entry)
        if entry.done.done() and not entry.done.cancelled():
            entry.done.exception()  # of a part that failed beside another one: asyncio would log that nobody asked

    def _entry(
        self, call: PoolingCall, card: ModelCard, inputs: TokenizedInputs, arrived_s: float, num_before: int
    ) -> PooledEntry:
        num_later = 0 if num_before else len(call.inputs) - len(inputs.places)
        num_tokens = sum(map(num_ids, inputs.prompts))
        request = Pool(
            f"{call.request_id}-part{num_before}" if num_before else call.request_id,
            0,
            card.names[0],
            b"",
            b"",
            b"",
            call.params,
            b"" if inputs.second_starts is None else inputs.second_starts.tobytes(),
            inputs.skip,
            call.priority,
            call.tenant,
            call.user,
            call.batch_line,
            call.cache_salt,
            later_prompts=num_later,
            later_tokens=num_tokens * num_later // len(inputs.places),
            is_later=num_before > 0,
        )
        return PooledEntry(request, inputs.prompts, lambda index: field_of(call, inputs.places[index]), arrived_s)


async def _all_done(parts: list[_SentPart]) -> None:
    if len(parts) == 1:
        await parts[0].entry.done
    else:
        await asyncio.gather(*(part.entry.done for part in parts))


def _items(parts: list[_SentPart], num_inputs: int) -> list[PooledText]:
    items: list[PooledText | None] = [None] * num_inputs
    for inputs, entry in parts:
        for place, result, num_tokens, ids in zip(
            inputs.places, entry.results, entry.lengths, inputs.prompts, strict=True
        ):
            assert result is not None, "the entry is done"
            items[place] = PooledText(result.numbers, result.width, num_tokens, ids, result.cached_tokens)
    return [item for item in items if item is not None]
