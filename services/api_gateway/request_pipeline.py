"""From a checked request to its text: tokenize, settle lengths, open the journal entries."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from blockyard.services.api_gateway.requests.generate_request import Job
from blockyard.services.api_gateway.responses.echo import Echo
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.services.api_gateway.responses.event_stream import EventStream
from blockyard.services.api_gateway.responses.full_response import Collected
from blockyard.services.api_gateway.responses.http_generation import Call
from blockyard.services.api_gateway.responses.response_writer import Outlet
from blockyard.shared.messages import Detokenize, Detokenized, Tokenized
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.journal import ChoiceLog, Entry

Sink = Collected | EventStream
log = logging.getLogger(__name__)

MAX_LOGGED = 8  # prompts whose lengths are in a line
LOGGED = {  # fields that are numbers -> values that say nothing
    "temperature": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "num_logprobs": None,
    "num_prompt_logprobs": None,
}


class Flow:
    def __init__(self, client: RingClient, log_requests: bool = False) -> None:
        self._log_requests = log_requests
        self.text_work, self.admission, self._dispatch = client.text_work, client.admission, client.dispatch
        self._meters, self.clock = client.meters, client.clock
        self._calls: set[Call] = set()
        self.num_active = 0  # HTTP requests between their arrival and the end of their answer

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    async def open(self, job: Job, name: str, tenant: str, outlet: Outlet | None) -> Call:
        """Sends the job's prompts into the ring; text goes to `outlet`, or is collected. Raises ApiError.

        `name` is unique: ids of requests in the ring begin with it.
        """
        arrived_s = self.clock()
        self.admission.check_room(job.card.names[0], arrived_s, tenant, job.user)
        prompts = await self.text_work.tokenize(job.prompts, name, job.truncate, job.shape.echo)
        self._meters.tokenized(self.clock() - arrived_s)
        samplings = [job.settle(len(p.token_ids) // 4, p.bad_words) for p in prompts]
        echoes = await self._echoes(job, prompts) if job.shape.echo else []
        num_tokens = sum(len(p.token_ids) // 4 for p in prompts)
        computed = job.choices.computed
        self._dispatch.check_hold(job.card.names[0], len(prompts) * computed, num_tokens * computed)
        call = Call(job, arrived_s, self._dispatch.close)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            num = job.choices.computed
            sinks = [_sink(call, i * num + k, outlet, prompt.token_ids) for k in range(num)]
            entry = Entry(
                request_id=prompt.request_id,
                model=job.card.names[0],
                prompt_ids=prompt.token_ids,
                block_names=prompt.block_names,
                sampling=sampling,
                text=job.text,
                choices=[ChoiceLog(k, sink) for k, sink in enumerate(sinks)],
                owner=call,
                now=arrived_s,
                priority=job.priority,
                tenant=tenant,
                user=job.user,
                cache_salt=job.cache_salt,
                beam=job.choices.beam,
                n=job.choices.returned,
            )
            if echoes:
                for sink in sinks:
                    sink.echo = Echo(*echoes[i], entry.prompt_logprobs)
            call.entries.append(entry)
        self._calls.add(call)
        if self._log_requests:
            _log(call)
        self._meters.requests += 1
        for entry in call.entries:
            self._dispatch.open(entry, self.clock())
        return call

    async def detokenize(self, work: Detokenize) -> Detokenized:
        answer = await self.text_work.submit(work)
        assert isinstance(answer, Detokenized)
        return answer

    def closed(self, call: Call) -> None:
        """The handler is done with the call, however it ended."""
        self._calls.discard(call)
        call.close()

    def abandon(self, error: ApiError) -> None:
        """Fails every open call: the process is about to end."""
        for call in list(self._calls):
            call.fail(error)

    async def _echoes(self, job: Job, prompts: list[Tokenized]) -> list[tuple[str, str]]:
        """Each prompt's text and, with log-probabilities, its first token's: that has none to bring it along."""
        texts = [p.text or asked.text or "" for asked, p in zip(job.prompts, prompts, strict=True)]
        if not job.shape.logprobs:
            return [(text, "") for text in texts]
        first_ids = [p.token_ids[:4] for p in prompts]
        if job.text.tokens_as_ids:
            return [(t, f"token_id:{int.from_bytes(i, 'little')}") for t, i in zip(texts, first_ids, strict=True)]
        names = [f"{p.request_id}-first" for p in prompts]
        model = job.card.names[0]
        firsts = await asyncio.gather(
            *(self.detokenize(Detokenize(n, model, i)) for n, i in zip(names, first_ids, strict=True))
        )
        return [(text, first.text) for text, first in zip(texts, firsts, strict=True)]


def _log(call: Call) -> None:
    """Ids and numbers: prompts, stop strings and bad words are text and stay out of logs."""
    job, sampling = call.job, call.entries[0].sampling
    fields = {name: getattr(sampling, name) for name in LOGGED if getattr(sampling, name) != LOGGED[name]}
    log.info(
        "%s: %d prompts of %s tokens for %s, n=%d, max_tokens=%d%s",
        job.shape.answer_id,
        len(call.entries),
        "+".join(str(entry.num_prompt_tokens) for entry in call.entries[:MAX_LOGGED]),
        job.shape.model,
        job.choices.returned,
        sampling.max_tokens,
        "".join(f", {name}={value}" for name, value in fields.items()),
    )


def _sink(call: Call, index: int, outlet: Outlet | None, prompt_ids: bytes) -> Sink:
    if outlet is None:
        return Collected(call.job.shape.no_output)
    return EventStream(call.job.shape, index, outlet, call.usage_json, prompt_ids)
