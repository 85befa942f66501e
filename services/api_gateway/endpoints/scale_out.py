"""Routes of --enable-scale-out: requests as they are rendered, and token ids in and out."""

from collections.abc import Iterator
from functools import partial

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.completions import COMPLETIONS
from blockyard.services.api_gateway.apis.registry import APIS
from blockyard.services.api_gateway.apis.responses.api import RESPONSES
from blockyard.services.api_gateway.apis.tokens.rendered import check_can_be_rendered, rendered
from blockyard.services.api_gateway.bodies.parse_body import ParsedGeneration
from blockyard.services.api_gateway.endpoints.generation import GenerationEndpoints
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import TENANT
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.responses.json_response import JSON

RENDERED = {f"{path}/render": api for api in (COMPLETIONS, CHAT, RESPONSES) for path in api.paths}


class ScaleOutEndpoints:
    """`generation` reads the bodies of rendered requests, and answers bodies with token ids."""

    def __init__(self, generation: GenerationEndpoints, pipeline: RequestPipeline) -> None:
        self._generation, self._pipeline = generation, pipeline

    def routes(self) -> Iterator[Route]:
        for path, api in RENDERED.items():
            yield Route("POST", path, partial(self.render, api.name), Access.KEY, api)
        for api in APIS.values():
            for path in api.paths if api.scale_out else ():
                yield Route("POST", path, partial(self.generate, api.name), Access.KEY, api)

    async def render(self, name: str, http_request: web.Request) -> web.Response:
        """The token ids, text and sampling parameters of such a request, as /inference/v1/generate takes them."""
        parsed = await self._generation.parse(http_request, name)
        assert isinstance(parsed, ParsedGeneration)
        request = parsed.request
        check_can_be_rendered(request)
        done = await self._pipeline.render(request, TENANT.get())
        found = [rendered(request, index, *one) for index, one in enumerate(done)]
        body = msgspec.json.encode(found if name == COMPLETIONS.name else found[0])
        return web.Response(body=body, content_type=JSON)

    async def generate(self, name: str, http_request: web.Request) -> web.StreamResponse:
        return await self._generation.generate(name, http_request)
