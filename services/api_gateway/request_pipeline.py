"""Sends a checked request into the ring: tokenizes its prompts, fixes the sampling, opens the journal entries."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import msgspec

from blockyard.services.api_gateway.apis.interface import Api, Echo
from blockyard.services.api_gateway.pooling_pipeline import PoolingPipeline
from blockyard.services.api_gateway.requests.dropped_turns import longest_fitting
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest
from blockyard.services.api_gateway.responses.event_stream import EventStream
from blockyard.services.api_gateway.responses.full_response import CollectedChoice, encode_full_response
from blockyard.services.api_gateway.responses.http_generation import HttpGeneration, OpenRequests
from blockyard.services.api_gateway.responses.logged_text import LoggedStream, choice_name, log_outputs, prompt_text
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter
from blockyard.services.api_gateway.responses.stream_interval import PacedStream
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    DEFAULT_SAMPLING,
    DescribeTokenizer,
    Detokenize,
    Detokenized,
    Generate,
    Sampling,
    Tokenize,
    Tokenized,
    TokenizerDescription,
)
from blockyard.shared.ring_client.choice_reader import ChoiceReader, open_reader
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.journal import ChoiceLog, JournalEntry, Sink
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.adapter_fields import adapter_tokenizer, generate_fields
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats, finds_reasoning
from blockyard.shared.ring_client.schedulers import not_ready
from blockyard.shared.token_ids import num_ids, unpack

ChoiceSink = CollectedChoice | EventStream
log = logging.getLogger(__name__)

BATCH_LINES = " (batch lines)"  # behind the tenant's name, at the tokenizers
Enter = Callable[[], Awaitable[None]]
MAX_LOGGED = 8  # prompt lengths in one log line
# sampling fields in the log line of a request: the temperature, and others that differ from their default
LOGGED = (*limits.RANGES, "ignore_eos", "num_logprobs", "num_prompt_logprobs")


class RequestPipeline:
    def __init__(self, client: RingClient, formats: ModelFormats, config: GatewayConfig) -> None:
        self._config, self._formats = config, formats
        bounds = (config.max_num_queued_reqs, config.max_num_queued_tokens)
        self._open = OpenRequests(*bounds, num_pooled_tokens=lambda: client.pooling.num_waiting_tokens)
        self.pooling = PoolingPipeline(client, self._open, config)
        self._logs_prompts = config.log_requests and bool(config.max_log_len)
        self.tokenizer_client, self.schedulers, self._dispatch = (
            client.tokenizer_client,
            client.schedulers,
            client.dispatch,
        )
        self._meters, self.clock = client.meters, client.clock

    @property
    def num_active(self) -> int:
        """Requests of generation and of pooling, from their parsed body to the end of their answer."""
        return self._open.num_requests

    def counted(self, request: GenerateRequest) -> AbstractContextManager[None]:
        """Counts an open request inside the block. Raises a 429 if there are as many as there may be."""
        return self._open.counted(request.choices.returned * len(request.prompts))

    async def whole_answer(self, api: Api, request: GenerateRequest, tenant: str, enter: Enter | None = None) -> bytes:
        """Returns the body of the answer to a request that is not streamed. Raises RequestError.

        `enter`: as in `open`.
        """
        if api.count is not None:
            prompts = await self.tokenizer_client.tokenize(request.prompts, secrets.token_hex(8), tenant=tenant)
            return api.count(sum(num_ids(p.token_ids) for p in prompts))
        with self.counted(request) if not request.batch_line else nullcontext():
            generation = await self.open(api, request, secrets.token_hex(10), tenant, None, enter)
            try:
                await generation.wait_finished()
                if generation.error is not None:
                    raise generation.error
                return encode_full_response(generation)
            finally:
                self.close(generation)

    async def render(self, request: GenerateRequest, tenant: str) -> list[tuple[Tokenized, Sampling]]:
        """What `open` would send into the ring, and where tokens are in the text. Raises RequestError."""
        prompts = [
            msgspec.structs.replace(
                prompt, want_offsets=request.wants_offsets, want_assistant_mask=request.wants_assistant_mask
            )
            for prompt in request.prompts
        ]
        request = replace(request, prompts=prompts, options=replace(request.options, prompt_text=True))
        done = await self._tokenize(request, secrets.token_hex(8), tenant)
        return [(prompt, request.finalize_sampling(prompt)) for prompt in done]

    async def tokenizer_settings(self, model: str, tenant: str) -> bytes:
        """JSON of the tokenizer's settings. Raises RequestError."""
        answer = await self.tokenizer_client.submit(DescribeTokenizer(secrets.token_hex(8), model, tenant))
        assert isinstance(answer, TokenizerDescription)
        return answer.settings

    async def open(
        self,
        api: Api,
        request: GenerateRequest,
        name: str,
        tenant: str,
        writer: ResponseWriter | None,
        enter: Enter | None = None,
    ) -> HttpGeneration:
        """Sends the request's prompts into the ring. Their text goes to `writer`, or is collected if that is None.

        `name` must be unique: the ids of the requests in the ring begin with it. `enter` is awaited when the prompts
        are token ids. Raises RequestError.
        """
        arrived_s, model, computed = self.clock(), request.card.names[0], request.choices.computed
        self.schedulers.check_capacity(model, arrived_s, tenant, request.user)
        self._check_room(request)
        prompts = await self._tokenize(request, name, tenant)
        self._meters.tokenized(self.clock() - arrived_s)
        if enter is not None:
            await enter()
        samplings = [request.finalize_sampling(p) for p in prompts]
        echoes = await self._echoes(request, prompts, tenant) if request.options.echo else []
        texts = _texts(request, prompts)
        num_tokens = sum(num_ids(p.token_ids) for p in prompts)
        self._check_room(request)  # others may have come meanwhile
        self._dispatch.check_hold(model, len(prompts) * computed, num_tokens * computed)
        generation = HttpGeneration(api, request, self._dispatch.close)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            shown = texts[i] if request.options.prompt_text else None
            sinks = [self._sink(generation, i * computed + k, writer, prompt, shown) for k in range(computed)]
            frame = Generate(
                request_id=prompt.request_id,
                attempt=0,
                model=model,
                prompt_ids=prompt.token_ids,
                block_hashes=prompt.block_hashes,
                sampling=sampling,
                text=request.text,
                choices=[],
                priority=request.priority,
                tenant=tenant,
                user=request.user,
                cache_salt=request.cache_salt,
                beam=request.choices.beam,
                batch_line=request.batch_line,
                kv_transfer_params=request.kv_transfer_params,
            )
            frame = generate_fields(frame, request.card)
            if shown is not None:
                generation.add_prompt_text(prompt.request_id, shown)
            logs = [ChoiceLog(k, self._outer(generation, frame, k, sink)) for k, sink in enumerate(sinks)]
            entry = JournalEntry(
                frame, logs, generation, arrived_s, request.choices.returned, request.options.no_output
            )
            if echoes:
                for sink in sinks:
                    sink.prepend(Echo(*echoes[i], entry.prompt_logprobs))
            generation.entries.append(entry)
        if not request.batch_line:
            self._open.add(generation)
        if self._config.log_requests:
            _log(generation)
        if self._logs_prompts:
            for entry, given, prompt in zip(generation.entries, request.prompts, prompts, strict=True):
                shown = prompt_text(given, prompt, self._config.max_log_len or 0)
                log.info("%s: prompt of %s: %s", request.options.answer_id, entry.request_id, shown)
        self._meters.request_opened()
        for entry in generation.entries:
            self._dispatch.open(entry, self.clock())
        if not request.batch_line:  # one that the ring is too busy for is opened again
            request.drop_prompts()
        return generation

    def _check_room(self, request: GenerateRequest) -> None:
        """Raises a 429 or a 503. A line of a batch file is not held while there is no scheduler: it is repeated."""
        if not request.batch_line:
            self._open.check_tokens()
        elif not self.schedulers.of(request.card.names[0]):
            raise not_ready(f"the model `{request.card.names[0]}`")

    async def _tokenize(self, request: GenerateRequest, name: str, tenant: str) -> list[Tokenized]:
        """Errors of messages name the API's own field."""
        if request.batch_line:
            tenant = f"{tenant}{BATCH_LINES}"  # tenants take turns: many lines do not delay one online prompt
        asked, options, grammar_field = request.prompts, request.options, request.grammar_field
        want_text = options.echo or options.prompt_text
        if self._logs_prompts or options.prompt_text:
            asked = [msgspec.structs.replace(prompt, want_text=True) for prompt in asked]
        try:
            if request.shortened_tokens and request.truncate is None:
                shortened = await self._shortened(asked[0], request, name, tenant)
                if shortened is not None:
                    return shortened
            return await self.tokenizer_client.tokenize(
                asked, name, request.truncate, want_text, grammar_field, tenant, keeps_start=request.keeps_start
            )
        except RequestError as e:
            if e.field == "messages":
                e.field = request.prompt_field
            raise

    async def _shortened(
        self, prompt: Tokenize, request: GenerateRequest, name: str, tenant: str
    ) -> list[Tokenized] | None:
        """The prompt with as many turns as leave room for the answer, or as fit at all. None: not even one fits."""
        messages = prompt.messages or b"[]"
        for limit in (request.shortened_tokens, prompt.max_tokens):

            def tokenize(kept: bytes, count: int, limit: int = limit) -> Awaitable[list[Tokenized]]:
                part = msgspec.structs.replace(prompt, messages=kept, max_tokens=limit)
                part_name = f"{name}-{limit}-{count}"
                return self.tokenizer_client.tokenize([part], part_name, None, False, request.grammar_field, tenant)

            found = await longest_fitting(messages, tokenize)
            if found is not None:
                return found
        return None

    async def detokenize(self, work: Detokenize) -> Detokenized:
        answer = await self.tokenizer_client.submit(work)
        assert isinstance(answer, Detokenized)
        return answer

    def close(self, generation: HttpGeneration) -> None:
        """The handler has ended; cancels the choices that still run."""
        self._open.remove(generation)
        generation.close()
        if self._config.log_outputs:
            log_outputs(generation, self._config.max_log_len)

    def abort(self, answer_ids: set[str]) -> int:
        """Ends the open requests with these answer ids, for an operator. Returns how many."""
        error = RequestError("An operator aborted this request.", status=499, code="request_aborted")
        return self._open.fail_named(answer_ids, error) + self.pooling.abort(answer_ids, error)

    def abandon(self, error: RequestError) -> None:
        """Fails every open request, before the process ends."""
        self._open.fail_all(error)
        self.pooling.abandon(error)

    def _sink(
        self,
        generation: HttpGeneration,
        index: int,
        writer: ResponseWriter | None,
        prompt: Tokenized,
        prompt_text: str | None,
    ) -> ChoiceSink:
        options, reader = generation.request.options, self._reader(generation, prompt)
        if writer is None:
            return CollectedChoice(options.no_output, reader)
        prompt_ids = unpack(prompt.token_ids) if options.token_ids else None
        events = generation.events.choice(index, prompt_ids, prompt_text)
        return EventStream(options, events, writer, generation.usage, reader)

    def _outer(self, generation: HttpGeneration, frame: Generate, index: int, sink: ChoiceSink) -> Sink:
        """The sink that the choice's deltas go to: of a stream, one for each feature that is on and sees its text."""
        if isinstance(sink, CollectedChoice):
            return sink
        config, outer = self._config, cast(Sink, sink)
        if config.log_outputs:
            name = choice_name(generation, frame.request_id, index)
            outer = LoggedStream(outer, name, config.log_deltas, config.max_log_len)
        paces = config.stream_interval > 1 and sink.merges
        return PacedStream(outer, config.stream_interval) if paces else outer

    def _reader(self, generation: HttpGeneration, prompt: Tokenized) -> ChoiceReader | None:
        request, formats = generation.request, self._formats.of(generation.request.card)
        form, opened, shows = request.output, prompt.reasoning_opened, request.options.include_reasoning
        if form is None:
            return None
        reader = open_reader(form, request.tools, formats, opened, shows, generation.fail)
        if finds_reasoning(form, formats):
            generation.count_reasoning_of(reader)
        return reader

    async def _echoes(self, request: GenerateRequest, prompts: list[Tokenized], tenant: str) -> list[tuple[str, str]]:
        """Each prompt's text and first token. No log-probability brings the first token's text, so it is asked for."""
        texts = _texts(request, prompts)
        if not request.options.logprobs:
            return [(text, "") for text in texts]
        first_ids = [p.token_ids[:4] for p in prompts]
        if request.text.tokens_as_ids:
            return [(t, f"token_id:{int.from_bytes(i, 'little')}") for t, i in zip(texts, first_ids, strict=True)]
        names = [f"{p.request_id}-first" for p in prompts]
        model, adapter = request.card.names[0], adapter_tokenizer(request.card)
        works = [
            Detokenize(name, model, ids, tenant, adapter=adapter) for name, ids in zip(names, first_ids, strict=True)
        ]
        firsts = await asyncio.gather(*map(self.detokenize, works))
        return [(text, first.text) for text, first in zip(texts, firsts, strict=True)]


def _texts(request: GenerateRequest, prompts: list[Tokenized]) -> list[str]:
    """The texts of prompts that were asked for with `want_text`, or given."""
    return [prompt.text or asked.text or "" for asked, prompt in zip(request.prompts, prompts, strict=True)]


def _log(generation: HttpGeneration) -> None:
    """Logs ids and numbers only. Prompts, stop strings and bad words are the user's text and stay out of logs."""
    request, frame = generation.request, generation.entries[0].request
    sampling = frame.sampling
    values = [(name, getattr(sampling, name), getattr(DEFAULT_SAMPLING, name)) for name in LOGGED]
    fields = {name: value for name, value, default in values if name == "temperature" or value != default}
    log.info(
        "%s: %d prompts of %s tokens for %s, n=%d, max_tokens=%d%s%s",
        request.options.answer_id,
        len(generation.entries),
        "+".join(str(entry.num_prompt_tokens) for entry in generation.entries[:MAX_LOGGED]),
        request.options.model,
        request.choices.returned,
        sampling.max_tokens,
        "".join(f", {name}={value}" for name, value in fields.items()),
        f", tenant={frame.tenant}" if frame.tenant else "",
    )
