"""Asks the ring for vectors, scores and classes of texts."""

from collections.abc import Callable, Sequence

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
        inputs = await self._jobs.tokenize(call, card)
        self._meters.tokenized(self._clock() - arrived_s)
        if call.check_room is not None:
            call.check_room()
        entry = self._entry(call, card, inputs, arrived_s)
        self._dispatch.check_hold(card.names[0], *entry.num_held)
        self._meters.request_opened()
        self._dispatch.open(entry, self._clock())
        self._open.add(entry)
        try:
            await entry.done
        finally:
            self._open.discard(entry)
            self._dispatch.close(entry)
        return PooledAnswer(card, _items(entry, inputs.prompts))

    def _entry(self, call: PoolingCall, card: ModelCard, inputs: TokenizedInputs, arrived_s: float) -> PooledEntry:
        seconds = b"" if inputs.second_starts is None else inputs.second_starts.tobytes()
        request = Pool(
            call.request_id,
            0,
            card.names[0],
            b"",
            b"",
            b"",
            call.params,
            seconds,
            inputs.skip,
            call.priority,
            call.tenant,
            call.user,
            call.batch_line,
            call.cache_salt,
        )
        return PooledEntry(request, inputs.prompts, lambda index: field_of(call, index), arrived_s)


def _items(entry: PooledEntry, prompts: Sequence[bytes]) -> list[PooledText]:
    items = []
    for result, num_tokens, ids in zip(entry.results, entry.lengths, prompts, strict=True):
        assert result is not None, "the entry is done"
        items.append(PooledText(result.numbers, result.width, num_tokens, ids, result.cached_tokens))
    return items
