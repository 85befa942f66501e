"""Runs the prompts of one call: tokenizes them, sends them into the ring and collects their outputs."""

import asyncio
import hashlib
import time
from dataclasses import dataclass
from functools import partial, reduce

import msgspec

from blockyard.services.offline.adapters.requests import NO_ADAPTERS, Adapters
from blockyard.services.offline.answers import AnswerReading
from blockyard.services.offline.inflight import InflightLimiter
from blockyard.services.offline.outputs import ArrivalTimes, OutputCollector, RequestOutput, RingLost, request_output
from blockyard.services.offline.prompts import Prompt
from blockyard.services.offline.sampling_params import CheckedParams
from blockyard.shared.errors import BlockyardError, RequestError
from blockyard.shared.messages import Generate, ModelCard, Tokenize, Tokenized
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.journal import ChoiceLog, JournalEntry
from blockyard.shared.ring_client.request_fields.adapter_fields import generate_fields, tokenize_fields
from blockyard.shared.ring_client.request_fields.finalize_sampling import finalize_sampling
from blockyard.shared.ring_client.request_fields.sampling_fields import fitting_truncation
from blockyard.shared.ring_client.tokenizer_client import TokenizerClient, cut_prompt


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    prompt: Prompt
    params: CheckedParams
    seed: int  # used if `params` has none
    priority: int = 0
    adapters: Adapters = NO_ADAPTERS

    def card(self, model: ModelCard) -> ModelCard:
        """The card of the model with this request's adapters."""
        return reduce(ModelCard.with_adapter, self.adapters.cards, model)


@dataclass(slots=True)
class BatchProgress:
    """Counters that another thread shows. Times are the client's clock."""

    began_s: float | None = None  # when all prompts had been tokenized
    last_finish_s: float = 0.0  # when the last finished prompt ended
    num_tokenized: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0  # of finished prompts
    num_output_tokens: int = 0

    def on_tokenized(self) -> None:
        self.num_tokenized += 1

    def on_begin(self, now: float) -> None:
        """All prompts were tokenized."""
        self.began_s = self.last_finish_s = now

    def add_output_tokens(self, num: int) -> None:
        self.num_output_tokens += num

    def add_prompt_tokens(self, num: int) -> None:
        self.num_prompt_tokens += num

    def on_finish(self, now: float) -> None:
        self.num_finished += 1
        self.last_finish_s = now


class RequestBatch:
    """Owns the journal entries of one call. Runs on the ring's event loop."""

    def __init__(
        self,
        name: str,
        requests: list[OfflineRequest],
        card: ModelCard,
        client: RingClient,
        limiter: InflightLimiter,
        progress: BatchProgress | None = None,
    ) -> None:
        """`progress`: told of everything that happens."""
        self._name, self._requests, self._card, self._client, self._limiter = name, requests, card, client, limiter
        self.progress = BatchProgress() if progress is None else progress
        self._arrival = ArrivalTimes(time.time(), client.clock())
        self._queued_s: dict[str, float] = {}  # request id -> when the scheduler accepted it
        self.outputs: list[RequestOutput | None] = [None] * len(requests)
        self.failures: dict[int, Exception] = {}
        self._indexes: dict[str, int] = {}  # by request id
        self._prompts: list[Tokenized] = []
        self._open: dict[str, JournalEntry] = {}
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Runs until each prompt has an output or a failure.

        Raises RequestError before any prompt runs if one of them cannot be served.
        """
        self._prompts = await self._tokenize()
        for index in range(len(self._requests)):
            entry = self._entry(index)
            self._indexes[entry.request_id] = index
            self._open[entry.request_id] = entry
        self.progress.on_begin(self._client.clock())
        self._client.meters.request_opened()
        try:
            for entry in self._open.values():
                self._limiter.enqueue(entry)
            self._limiter.send_pending()
            if self._open:
                await self._done.wait()
        finally:
            for entry in self._open.values():
                self._limiter.remove(entry)
                self._client.dispatch.close(entry)

    def accepted(self, entry: JournalEntry) -> None:
        self._queued_s[entry.request_id] = self._client.clock()
        self._limiter.on_answered(entry)
        self._limiter.send_pending()

    def begun(self, entry: JournalEntry) -> None:
        """Outputs are read as a whole, and from `unfinished_outputs`."""

    def finished(self, entry: JournalEntry) -> None:
        if entry.request_id not in self._open:  # its text could not be read
            return
        self.outputs[self._indexes[entry.request_id]] = self._output(entry)
        self.progress.add_prompt_tokens(entry.num_prompt_tokens)
        self._ended(entry)

    def unfinished_outputs(self) -> list[RequestOutput]:
        """Returns the outputs of the running requests so far."""
        return [self._output(entry) for entry in self._open.values() if entry.request_id in self._queued_s]

    def failed(self, entry: JournalEntry, error: RequestError) -> None:
        if error.status == 429 and not entry.accepted:
            self._limiter.on_refused(entry)
            return
        self.failures[self._indexes[entry.request_id]] = error
        self._ended(entry)

    def abort(self, error: RequestError) -> None:
        for entry in list(self._open.values()):
            self._limiter.remove(entry)
            self._client.dispatch.close(entry)
            self.failed(entry, error)

    def _ended(self, entry: JournalEntry) -> None:
        self._limiter.on_answered(entry)
        del self._open[entry.request_id]
        self.progress.on_finish(self._client.clock())
        if not self._open:
            self._done.set()

    def _output(self, entry: JournalEntry) -> RequestOutput:
        index = self._indexes[entry.request_id]
        request, prompt = self._requests[index], self._prompts[index]
        text = request.prompt.text if request.prompt.text is not None else prompt.text or None
        params, queued_s = request.params, self._queued_s[entry.request_id]
        return request_output(
            entry,
            text,
            params.choices.returned,
            params.num_logprobs,
            self._arrival,
            queued_s,
            self._reading(request),
            request.adapters.lora_request,
        )

    def _reading(self, request: OfflineRequest) -> AnswerReading | None:
        return request.prompt.reading if request.params.detokenize else None

    def _unreadable(self, request_id: str, error: RequestError) -> None:
        """A format of a user's file raised: this prompt fails, and its sequences end."""
        entry = self._open.get(request_id)
        if entry is not None:
            self._client.dispatch.close(entry)
            self.failed(entry, error)

    async def _tokenize(self) -> list[Tokenized]:
        """Tokenizes all prompts. Raises RequestError for the first one that is refused."""
        works = [self._work(f"{self._name}-{i}", request) for i, request in enumerate(self._requests)]
        done = await self._tokenize_all(works)
        cut = [
            cut_prompt(work, whole, kept, work.want_text)
            for work, whole, kept in zip(works, done, map(self._kept, self._requests), strict=True)
            if kept is not None
        ]
        again = {answer.request_id: answer for answer in await self._tokenize_all(cut)}
        return [again.get(whole.request_id, whole) for whole in done]

    def _kept(self, request: OfflineRequest) -> int | None:
        params = request.params
        return fitting_truncation(params.truncate, params.max_tokens, request.card(self._card).max_model_len)

    def _work(self, request_id: str, request: OfflineRequest) -> Tokenize:
        params, reading, card = request.params, request.prompt.reading, request.card(self._card)
        calls = None if reading is None or params.grammar is not None else reading.grammar
        grammar = params.grammar if calls is None else calls.grammar
        reasons_first = grammar is not None and not (calls is not None and calls.allows_reasoning)
        return msgspec.structs.replace(
            tokenize_fields(request.prompt.work, card),
            request_id=request_id,
            bad_words=params.bad_words,
            grammar=grammar,
            reasoning_end=card.settings.tools.reasoning_end if reasons_first else "",
            reasoning_start=card.settings.tools.reasoning_start if reasons_first else "",
            max_tokens=card.max_model_len if params.truncate is None else 0,
        )

    async def _tokenize_all(self, works: list[Tokenize]) -> list[Tokenized]:
        tokenizer_client: TokenizerClient = self._client.tokenizer_client
        futures = [tokenizer_client.submit(work) for work in works]
        out = []
        try:
            for future, work in zip(futures, works, strict=True):
                try:
                    answer = await future
                except RequestError as e:
                    raise self._with_prompt(e, int(work.request_id.rpartition("-")[2])) from e
                assert isinstance(answer, Tokenized)
                out.append(answer)
                self.progress.on_tokenized()
        finally:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # marks it as retrieved for asyncio: only the first error is raised
        return out

    def _entry(self, index: int) -> JournalEntry:
        request, prompt = self._requests[index], self._prompts[index]
        params, where, add_tokens = request.params, request.prompt.where, self.progress.add_output_tokens
        reading, card = self._reading(request), request.card(self._card)
        sampling = finalize_sampling(
            params.sampling,
            prompt,
            card=card,
            max_tokens=params.max_tokens,
            seed=request.seed if params.seed is None else params.seed,
            prompt_field=where,
        )
        frame = Generate(
            request_id=prompt.request_id,
            attempt=0,
            model=self._card.names[0],
            prompt_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes,
            sampling=sampling,
            text=params.text if reading is None else reading.text_options(params.text),
            choices=[],
            priority=request.priority,
            cache_salt=request.prompt.work.cache_salt,
            beam=params.choices.beam,
            kv_transfer_params=params.kv_transfer_params,
        )
        frame = generate_fields(frame, card)
        sinks = []
        for _ in range(params.choices.computed):
            failed = partial(self._unreadable, prompt.request_id)
            reader = None if reading is None else reading.open(prompt.reasoning_opened, failed)
            sinks.append(OutputCollector(add_tokens, params.detokenize, reader))
        logs = [ChoiceLog(i, sink) for i, sink in enumerate(sinks)]
        return JournalEntry(frame, logs, self, self._arrival.clock_s, params.choices.returned)

    def _with_prompt(self, error: RequestError, index: int) -> BlockyardError:
        """Returns the error with the prompt it is about."""
        where = self._requests[index].prompt.where
        if error.status >= 500:
            return RingLost(f"{where}: {error}")
        return RequestError(f"{where}: {error}", where, error.status, error.code, error.retry_after_s)


class Seeds:
    """Derives the seeds of requests without one from the LLM's `seed`."""

    def __init__(self, seed: int) -> None:
        self._seed, self._number = seed, 0

    def next(self, params: CheckedParams) -> int:
        if params.seed is not None:
            return params.seed
        self._number += 1
        return derived_seed(self._seed, self._number)


def derived_seed(seed: int, number: int) -> int:
    """Returns 64 bits for the `number`th request without a seed."""
    digest = hashlib.sha256(b"blockyard offline" + seed.to_bytes(8, "little") + number.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")
