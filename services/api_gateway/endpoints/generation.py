"""Generation (chat, completions and others), SageMaker's /invocations, tokenize and detokenize."""

import secrets
from collections.abc import Iterator
from functools import partial

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.registry import APIS
from blockyard.services.api_gateway.apis.responses.api import ResponsesEvents
from blockyard.services.api_gateway.bodies.body_parser import BodyParser
from blockyard.services.api_gateway.bodies.parse_body import (
    DETOKENIZE,
    INVOCATION,
    TOKENIZE,
    ParseContext,
    ParsedBody,
    ParsedGeneration,
    ParsedPooling,
    ParsedText,
)
from blockyard.services.api_gateway.endpoints.followed_responses import FollowedResponses
from blockyard.services.api_gateway.endpoints.pooling import pooled_answer
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import IGNORED, REQUEST_ID, TENANT
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest
from blockyard.services.api_gateway.requests.ignored_fields import IgnoredFields
from blockyard.services.api_gateway.responses.http_generation import HttpGeneration
from blockyard.services.api_gateway.responses.json_response import JSON, error_response, json_response
from blockyard.services.api_gateway.responses.streamed_responses import HEADERS, StreamedResponses
from blockyard.services.api_gateway.stored_responses.local_responses import store_options
from blockyard.services.api_gateway.stored_responses.stored_responses import StoredResponses
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Detokenize, Tokenize
from blockyard.shared.token_ids import unpack


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


class GenerationEndpoints:
    def __init__(
        self,
        pipeline: RequestPipeline,
        streams: StreamedResponses,
        body_parser: BodyParser,
        uploads: Uploads,
        stored: StoredResponses,
        following: FollowedResponses,
    ) -> None:
        self._pipeline, self._streams, self._body_parser, self._uploads = pipeline, streams, body_parser, uploads
        self._stored, self._following = stored, following
        self._ignored = IgnoredFields()

    def routes(self) -> Iterator[Route]:
        for api in APIS.values():
            for path in () if api.scale_out else api.paths:
                yield Route("POST", path, partial(self.generate, api.name), Access.KEY, api)
                if api.tries_websocket:
                    yield Route("GET", path, _refuse_websocket, Access.KEY, api)
        yield Route("POST", "/invocations", self.invoke, Access.KEY)
        yield Route("POST", "/tokenize", self.tokenize, Access.KEY)
        yield Route("POST", "/detokenize", self.detokenize, Access.KEY)

    async def tokenize(self, http_request: web.Request) -> web.Response:
        parsed = await self.parse(http_request, TOKENIZE)
        assert isinstance(parsed, ParsedText) and isinstance(parsed.work, Tokenize)
        client, name = self._pipeline.tokenizer_client, secrets.token_hex(8)
        (done,) = await client.tokenize([parsed.work], name, tenant=TENANT.get())
        ids = unpack(done.token_ids)
        strs = done.pieces if parsed.want_pieces else None
        return json_response(TokenizeAnswer(len(ids), parsed.card.max_model_len, ids, strs))

    async def detokenize(self, http_request: web.Request) -> web.Response:
        parsed = await self.parse(http_request, DETOKENIZE)
        assert isinstance(parsed, ParsedText) and isinstance(parsed.work, Detokenize)
        work = msgspec.structs.replace(parsed.work, request_id=secrets.token_hex(8), tenant=TENANT.get())
        return json_response(DetokenizeAnswer((await self._pipeline.detokenize(work)).text))

    async def parse(self, http_request: web.Request, endpoint: str) -> ParsedBody:
        """Reads and parses the body. Unknown fields are reported in a response header."""
        context = ParseContext(endpoint, REQUEST_ID.get(), self._pipeline.schedulers.served())
        async with self._uploads.read(http_request) as body:
            if endpoint in APIS and APIS[endpoint].parse_stored is not None:
                context = msgspec.structs.replace(context, stored=await self._stored.turn(body, TENANT.get()))
            parsed = await self._body_parser.parse(body, context)
        if parsed.ignored:
            IGNORED.set(self._ignored.note(parsed.ignored))
        return parsed

    async def generate(self, endpoint: str, http_request: web.Request) -> web.StreamResponse:
        # without a docstring: the rows of its routes say what their Structs say
        parsed = await self.parse(http_request, endpoint)
        assert isinstance(parsed, ParsedGeneration)
        return await self._generate(http_request, parsed)

    async def invoke(self, http_request: web.Request) -> web.StreamResponse:
        """SageMaker's route: what the model serves, by the body's fields."""
        parsed = await self.parse(http_request, INVOCATION)
        if isinstance(parsed, ParsedPooling):
            return await pooled_answer(self._pipeline, parsed)
        assert isinstance(parsed, ParsedGeneration)
        return await self._generate(http_request, parsed)

    async def _generate(self, http_request: web.Request, parsed: ParsedGeneration) -> web.StreamResponse:
        api, request, tenant = APIS[parsed.api], parsed.request, TENANT.get()
        store = store_options(request) if api.count is None else None
        if store is not None:
            self._stored.check_new(request)
            if store.background:
                return await self._background(http_request, api, request)
        if api.count is not None or not request.options.stream:
            data = await self._pipeline.whole_answer(api, request, tenant)
            if store is not None:
                self._stored.local.keep(request, tenant, data)
            return web.Response(body=data, content_type=JSON)
        with self._pipeline.counted(request):
            return await self._stream(http_request, api, request)

    async def _background(self, http_request: web.Request, api: Api, request: GenerateRequest) -> web.StreamResponse:
        """Starts the response and answers with its beginning, or with its events for as long as the client reads."""
        run = self._stored.local.start(api, request, TENANT.get())
        if request.options.stream:
            return await self._following.follow(http_request, request.options.answer_id, -1)
        return web.Response(body=run.record().data, content_type=JSON)

    async def _stream(self, http_request: web.Request, api: Api, request: GenerateRequest) -> web.StreamResponse:
        writer = self._streams.writer()
        try:
            generation = await self._pipeline.open(api, request, secrets.token_hex(10), TENANT.get(), writer)
        except RequestError as e:
            if e.code not in api.streamed_codes:
                raise
            events = api.events(request.options)
            data = events.choice(0, None).opening(None) + events.failed(e)
            return web.Response(body=data, headers=HEADERS)
        if store_options(request) is not None:
            generation.on_ending = partial(self._keep_streamed, generation, TENANT.get())
        try:
            return await self._streams.run(http_request, generation, writer)
        finally:
            self._pipeline.close(generation)

    def _keep_streamed(self, generation: HttpGeneration, tenant: str) -> None:
        """Before the client learns that the answer has ended: it may go on with it at once."""
        assert isinstance(generation.events, ResponsesEvents)
        self._stored.local.keep(generation.request, tenant, generation.events.final)


async def _refuse_websocket(http_request: web.Request) -> web.Response:
    """A 426 for a client that asks for a WebSocket: it is to use POST. Any other GET is a 405."""
    if http_request.headers.get("Upgrade", "").lower() != "websocket":
        raise web.HTTPMethodNotAllowed(http_request.method, ["POST"])
    error = RequestError("This server has no WebSocket here: send a POST.", status=426, code="upgrade_required")
    response = error_response(error)
    response.headers["Upgrade"] = "HTTP/1.1"
    return response
