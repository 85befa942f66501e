"""Vectors, scores, ranks and classes of texts: the endpoints of pooling models."""

from collections.abc import Iterator
from functools import partial

from aiohttp import web

from blockyard.services.api_gateway.apis.pooling.registry import POOLING_APIS
from blockyard.services.api_gateway.bodies.body_parser import BodyParser
from blockyard.services.api_gateway.bodies.parse_body import ParseContext, ParsedPooling
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import IGNORED, REQUEST_ID, TENANT
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.requests.ignored_fields import IgnoredFields
from blockyard.services.api_gateway.responses.json_response import JSON


class PoolingEndpoints:
    def __init__(self, pipeline: RequestPipeline, body_parser: BodyParser, uploads: Uploads) -> None:
        self._pipeline, self._body_parser, self._uploads = pipeline, body_parser, uploads
        self._ignored = IgnoredFields()

    def routes(self) -> Iterator[Route]:
        for api in POOLING_APIS.values():
            for path in api.paths:
                yield Route("POST", path, partial(self._answer, api.name), Access.KEY)

    async def _answer(self, endpoint: str, http_request: web.Request) -> web.Response:
        context = ParseContext(endpoint, REQUEST_ID.get(), self._pipeline.schedulers.served())
        async with self._uploads.read(http_request) as body:
            parsed = await self._body_parser.parse(body, context)
        assert isinstance(parsed, ParsedPooling)
        if parsed.ignored:
            IGNORED.set(self._ignored.note(parsed.ignored))
        return await pooled_answer(self._pipeline, parsed)


async def pooled_answer(pipeline: RequestPipeline, parsed: ParsedPooling) -> web.Response:
    """Raises RequestError."""
    body = await pipeline.pooling.answer(POOLING_APIS[parsed.api], parsed.request, TENANT.get())
    return web.Response(body=body, content_type=JSON)
