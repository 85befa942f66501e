"""The endpoints that need the ring: generation, tokenize, detokenize, models."""

import codecs
import secrets
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.access import Access, Route
from blockyard.services.api_gateway.answers import answer, ids_of
from blockyard.services.api_gateway.caller import IGNORED, REQUEST_ID, TENANT
from blockyard.services.api_gateway.errors import ApiError
from blockyard.services.api_gateway.flow import Flow
from blockyard.services.api_gateway.ignored_fields import IgnoredFields
from blockyard.services.api_gateway.job import Job
from blockyard.services.api_gateway.outlet import Outlet
from blockyard.services.api_gateway.prompt_fields import chat_prompt, completion_prompts
from blockyard.services.api_gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)
from blockyard.services.api_gateway.streams import Streams
from blockyard.services.api_gateway.validate import read_chat, read_completion
from blockyard.shared.config.gateway import GatewayConfig
from blockyard.shared.messages import Detokenize
from blockyard.shared.ring_client import limits
from blockyard.shared.ring_client.chat_messages import NULL
from blockyard.shared.token_ids import pack

JSON = "application/json"
T = TypeVar("T", bound=msgspec.Struct)


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


class Invocation(msgspec.Struct):
    """As much of a body as tells chat from completions."""

    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


class Handlers:
    def __init__(self, config: GatewayConfig, flow: Flow, streams: Streams) -> None:
        self._config, self._flow, self._streams = config, flow, streams
        self._ignored = IgnoredFields()

    def routes(self) -> Iterator[Route]:
        for path, handler in (
            ("/v1/chat/completions", self.chat),
            ("/v1/completions", self.completion),
            ("/invocations", self.invocations),
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
        ):
            yield "POST", path, handler, Access.KEY

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, ChatRequest)
        card = self._flow.admission.card(asked.model)
        name = asked.request_id or REQUEST_ID.get()
        return await self._generate(request, read_chat(asked, card, self._config, name))

    async def completion(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, CompletionRequest)
        card = self._flow.admission.card(asked.model)
        name = asked.request_id or REQUEST_ID.get()
        return await self._generate(request, read_completion(asked, card, self._config, name))

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """As SageMaker asks: the body says which endpoint is meant. Its own errors are told by that endpoint."""
        try:
            asked = msgspec.json.decode((await request.read()).removeprefix(codecs.BOM_UTF8), type=Invocation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return await self.completion(request)
        if bytes(asked.messages) == bytes(NULL) == bytes(asked.prompt):
            raise ApiError("either messages, as for chat completions, or prompt, as for completions", "messages")
        return await (self.completion if bytes(asked.messages) == bytes(NULL) else self.chat)(request)

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = await self._read(request, TokenizeRequest)
        card = self._flow.admission.card(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError("either prompt or messages, and not both", "prompt")
        if asked.messages is not None:
            work = chat_prompt(asked, card)
        else:
            work = msgspec.structs.replace(
                completion_prompts(asked.prompt, card)[0], add_special_tokens=asked.add_special_tokens
            )
        work = msgspec.structs.replace(work, want_pieces=bool(asked.return_token_strs))
        done = (await self._flow.text_work.tokenize([work], secrets.token_hex(8)))[0]
        ids = ids_of(done.token_ids)
        strs = done.pieces if asked.return_token_strs else None
        return json_response(TokenizeAnswer(len(ids), card.max_model_len, ids, strs))

    async def detokenize(self, request: web.Request) -> web.Response:
        asked = await self._read(request, DetokenizeRequest)
        card = self._flow.admission.card(asked.model)
        if len(asked.tokens) > card.max_model_len:
            raise ApiError(
                f"at most {card.max_model_len} tokens, the model's maximum context length, got {len(asked.tokens)}",
                "tokens",
                code="context_length_exceeded",
            )
        limits.token_ids("tokens", asked.tokens, card.vocab_size)
        work = Detokenize(secrets.token_hex(8), card.names[0], pack(asked.tokens))
        return json_response(DetokenizeAnswer((await self._flow.detokenize(work)).text))

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        """The request's body. Unknown fields are ignored, and named in a header of the answer."""
        asked, ignored = decode(await request.read(), kind, self._config.strict_fields)
        if ignored:
            IGNORED.set(self._ignored.note(ignored))
        return asked

    async def _generate(self, request: web.Request, job: Job) -> web.StreamResponse:
        with self._flow.counted():
            return await self._answer(request, job)

    async def _answer(self, request: web.Request, job: Job) -> web.StreamResponse:
        outlet = Outlet(self._streams.unread) if job.shape.stream else None
        call = await self._flow.open(job, secrets.token_hex(10), TENANT.get(), outlet)
        try:
            if outlet is not None:
                await call.settle()
                return await self._streams.run(request, call, outlet)
            await call.finish()
            if call.error is not None:
                raise call.error
            return web.Response(body=answer(call), content_type=JSON)
        finally:
            self._flow.closed(call)


def json_response(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)
