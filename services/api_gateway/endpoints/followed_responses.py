"""Streams of background responses, from any event on. The response does not depend on its readers."""

import asyncio
import logging

from aiohttp import web

from blockyard.services.api_gateway.apis.responses.api import RESPONSES
from blockyard.services.api_gateway.http.request_context import TENANT
from blockyard.services.api_gateway.responses.streamed_responses import HEADERS
from blockyard.services.api_gateway.stored_responses.stored_responses import WAIT_S, StoredResponses
from blockyard.shared.errors import RequestError

log = logging.getLogger(__name__)

FIRST_S = 1.0  # the headers wait so long for the first events


class FollowedResponses:
    """Its gateway keeps the events, so a client that reads slowly costs no memory and delays only itself."""

    def __init__(self, stored: StoredResponses, keepalive_s: float, client_timeout_s: float) -> None:
        """keepalive_s: 0: nothing keeps a silent stream alive."""
        self._stored, self._client_timeout_s = stored, client_timeout_s
        self._patience_s = min(keepalive_s, WAIT_S) or None  # None: no comments are sent

    async def follow(self, http_request: web.Request, response_id: str, after: int) -> web.StreamResponse:
        """Sends the events behind number `after`, up to the last one. Raises RequestError before the first."""
        tenant = TENANT.get()
        page = await self._stored.events(response_id, tenant, after, FIRST_S)
        response = web.StreamResponse(headers=HEADERS)
        if http_request.version >= (1, 1):
            response.enable_chunked_encoding()
        else:
            response.force_close()
        await response.prepare(http_request)
        try:
            while True:
                if page.data or self._patience_s is not None:
                    await self._write(http_request, response, page.data or RESPONSES.keep_alive)
                if page.ended:
                    await response.write_eof()
                    return response
                page = await self._stored.events(response_id, tenant, page.last, self._patience_s or WAIT_S)
        except RequestError as e:  # the response was deleted, or its gateway is gone: the stream has no end
            log.warning("the stream of %s ends early: %s", response_id[:200], e)
            http_request.protocol.close()
            return response

    async def _write(self, http_request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._client_timeout_s):
                await response.write(data)
        except TimeoutError:
            log.warning("a client took nothing for %.0f s: its stream is closed", self._client_timeout_s)
            if http_request.transport is not None:
                http_request.transport.abort()
            raise
