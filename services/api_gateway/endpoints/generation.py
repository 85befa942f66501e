"""The endpoints that need the ring: generation, tokenize, detokenize, models."""

import secrets
from collections.abc import Iterator

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import IGNORED, REQUEST_ID, TENANT
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.request_pipeline import Flow
from blockyard.services.api_gateway.requests.body_parser import Bodies
from blockyard.services.api_gateway.requests.generate_request import Job
from blockyard.services.api_gateway.requests.ignored_fields import IgnoredFields
from blockyard.services.api_gateway.requests.parse_body import Asked, Generation, Kind, Terms, TextJob
from blockyard.services.api_gateway.responses.full_response import answer, ids_of
from blockyard.services.api_gateway.responses.response_writer import Outlet
from blockyard.services.api_gateway.responses.streams import Streams
from blockyard.shared.messages import Detokenize, Tokenize

JSON = "application/json"


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


class Handlers:
    def __init__(self, flow: Flow, streams: Streams, bodies: Bodies, uploads: Uploads) -> None:
        self._flow, self._streams, self._bodies, self._uploads = flow, streams, bodies, uploads
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
        return await self._generate(request, "chat")

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completion")

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """As SageMaker asks: the body says which endpoint is meant."""
        return await self._generate(request, "invocation")

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = await self._read(request, "tokenize")
        assert isinstance(asked, TextJob) and isinstance(asked.work, Tokenize)
        done = (await self._flow.text_work.tokenize([asked.work], secrets.token_hex(8)))[0]
        ids = ids_of(done.token_ids)
        strs = done.pieces if asked.want_pieces else None
        return json_response(TokenizeAnswer(len(ids), asked.card.max_model_len, ids, strs))

    async def detokenize(self, request: web.Request) -> web.Response:
        asked = await self._read(request, "detokenize")
        assert isinstance(asked, TextJob) and isinstance(asked.work, Detokenize)
        work = msgspec.structs.replace(asked.work, request_id=secrets.token_hex(8))
        return json_response(DetokenizeAnswer((await self._flow.detokenize(work)).text))

    async def _read(self, request: web.Request, kind: Kind) -> Asked:
        """The request's body. Unknown fields are ignored, and named in a header of the answer."""
        terms = Terms(kind, REQUEST_ID.get(), self._flow.admission.served())
        async with self._uploads.read(request) as body:
            asked = await self._bodies.read(body, terms)
        if asked.ignored:
            IGNORED.set(self._ignored.note(asked.ignored))
        return asked

    async def _generate(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        asked = await self._read(request, kind)
        assert isinstance(asked, Generation)
        with self._flow.counted():
            return await self._answer(request, asked.job)

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
