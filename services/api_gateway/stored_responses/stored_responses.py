"""Stored responses of all gateways by their ids, and the conversations that they are turns of."""

import codecs
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.responses.stored_items import (
    REFERENCE,
    gateway_of,
    new_name,
    output_of,
    response_of_item,
    status_of,
)
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest, StoredTurn
from blockyard.services.api_gateway.stored_responses.disk_store import DiskStore
from blockyard.services.api_gateway.stored_responses.local_responses import EventPage, LocalResponses
from blockyard.services.api_gateway.stored_responses.memory_store import MemoryStore
from blockyard.services.api_gateway.stored_responses.other_gateways import OtherGateways
from blockyard.services.api_gateway.stored_responses.response_store import FIELD, StoreLimits, lost, not_found
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ResponseQuery, ResponseReply, ResponseVerb, StoredResponse
from blockyard.shared.ring_client.request_fields.chat_messages import NULL
from blockyard.shared.ring_client.ring_links import RingLinks

PREVIOUS = "previous_response_id"
NOT_FOUND = "previous_response_not_found"
REPLY_S = 5.0  # for another gateway's reply
WAIT_S = 10.0  # a gateway waits so long for events that another gateway asks for


class _AskedTurn(msgspec.Struct):
    """The fields of a body by which its conversation is found. The parser reports their errors."""

    previous_response_id: Any = None
    conversation: msgspec.Raw = NULL
    input: msgspec.Raw = NULL


class _AskedItem(msgspec.Struct):
    type: Any = None
    id: Any = None


_decode_item = msgspec.json.Decoder(_AskedItem).decode


class StoredResponses:
    """Raises RequestError for what a client asked."""

    def __init__(
        self,
        config: GatewayConfig,
        links: RingLinks,
        pipeline: RequestPipeline,
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Raises ConfigError if the folder of --response-store cannot be used."""
        limits = StoreLimits(config.max_stored_responses, config.max_stored_response_bytes, config.response_ttl_s)
        self.is_on = config.max_stored_responses > 0
        self._links, self._max_bytes = links, config.max_body_bytes
        own = links.me.incarnation
        folder = Path(config.response_store)
        self._store = DiskStore(folder, limits, own) if config.response_store and self.is_on else MemoryStore(limits)
        self.local = LocalResponses(self._store, limits.max_responses, pipeline, counted)
        self.others = OtherGateways(links)

    async def turn(self, body: bytes, tenant: str) -> StoredTurn | None:
        """What the parser has to know of the body's conversation; None: no response is stored here."""
        if not self.is_on:
            return None
        name = new_name(self._links.me.incarnation)
        names_items = REFERENCE.encode() in body
        if not names_items and PREVIOUS.encode() not in body:  # nearly every one, and some bodies are large
            return StoredTurn(name)
        try:
            asked = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8), type=_AskedTurn)
            references = _references(asked.input) if names_items else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return StoredTurn(name)
        referenced = await self._referenced(references, tenant) if references else b""
        previous = asked.previous_response_id
        if not isinstance(previous, str) or bytes(asked.conversation) != b"null":
            return StoredTurn(name, b"", referenced)
        return StoredTurn(name, await self._history(previous, tenant), referenced)

    def check_new(self, request: GenerateRequest) -> None:
        """Raises a 400 if there is a response of the id that the request asks for."""
        response_id = request.options.answer_id
        if self.local.has(response_id):
            raise RequestError(f"there is a stored response of the id {response_id!r}", "request_id")

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        found = self.local.get(response_id, tenant)
        owner = gateway_of(response_id)
        if found is not None and (found.ended or owner is None or not self.others.is_member(owner)):
            return found
        reply = await self._ask(response_id, tenant, ResponseVerb.READ)
        assert reply.response is not None
        return reply.response

    async def input_items(self, response_id: str, tenant: str) -> list[msgspec.Raw]:
        """All items that the response was generated from, in order."""
        *before, last = await self._chain(response_id, tenant, is_whole=False)
        items = [item for one in before for item in _items(one)]
        return items + _raw_list(last.input_items)

    async def cancel(self, response_id: str, tenant: str) -> StoredResponse:
        if self._is_here(response_id, tenant):
            return await self.local.cancel(response_id, tenant)
        reply = await self._ask(response_id, tenant, ResponseVerb.CANCEL)
        assert reply.response is not None
        return reply.response

    async def delete(self, response_id: str, tenant: str) -> None:
        if self._is_here(response_id, tenant):
            self.local.delete(response_id, tenant)
        else:
            await self._ask(response_id, tenant, ResponseVerb.DELETE)

    async def events(self, response_id: str, tenant: str, after: int, patience_s: float) -> EventPage:
        """Events behind number `after`. Waits for some; returns none if there are none for a while."""
        if self._is_here(response_id, tenant):
            return await self.local.events(response_id, tenant, after, patience_s)
        reply = await self._ask(response_id, tenant, ResponseVerb.EVENTS, after)
        return EventPage(reply.events, reply.last, reply.ended)

    def asked(self, peer: int, frame: ResponseQuery) -> None:
        """Another gateway asks for a response of this one."""
        try:
            self.local.spawn(self._answer(peer, frame))
        except RequestError as e:
            self._links.answer(peer, _error(frame, e))

    async def _answer(self, peer: int, frame: ResponseQuery) -> None:
        try:
            reply = await self._reply(frame)
        except RequestError as e:
            reply = _error(frame, e)
        self._links.answer(peer, reply)

    async def _reply(self, frame: ResponseQuery) -> ResponseReply:
        local, response_id, tenant = self.local, frame.response_id, frame.tenant
        match frame.verb:
            case ResponseVerb.CANCEL:
                return ResponseReply(frame.request_id, await local.cancel(response_id, tenant))
            case ResponseVerb.DELETE:
                local.delete(response_id, tenant)
                return ResponseReply(frame.request_id)
            case ResponseVerb.EVENTS:
                page = await local.events(response_id, tenant, frame.after, WAIT_S)
                return ResponseReply(frame.request_id, events=page.data, last=page.last, ended=page.ended)
        found = local.get(response_id, tenant)
        if found is None:
            raise not_found(response_id)
        return ResponseReply(frame.request_id, found)

    def _is_here(self, response_id: str, tenant: str) -> bool:
        """Whether no other gateway is asked. Raises a 404 if none could know the response."""
        if gateway_of(response_id) == self._links.me.incarnation:
            return True
        found = self.local.get(response_id, tenant)
        return found is not None and found.ended

    async def _ask(self, response_id: str, tenant: str, verb: ResponseVerb, after: int = -1) -> ResponseReply:
        owner = gateway_of(response_id)
        if owner is None or owner == self._links.me.incarnation:
            raise not_found(response_id)
        if not self._links.members:  # this gateway has just started, and the others may live
            raise RequestError("The server is starting.", FIELD, status=503, retry_after_s=1.0)
        if not self.others.is_member(owner):
            raise not_found(response_id) if self._store.is_shared else lost(response_id)
        patience_s = REPLY_S + (WAIT_S if verb is ResponseVerb.EVENTS else 0.0)
        return await self.others.ask(owner, response_id, tenant, verb, patience_s, after)

    async def _history(self, previous: str, tenant: str) -> bytes:
        """The items of a response and of all before it, with their answers, as a JSON list."""
        try:
            chain = await self._chain(previous, tenant, is_whole=True)
        except RequestError as e:
            if e.field == FIELD:
                e.field, e.code = PREVIOUS, NOT_FOUND if e.code == "not_found" else e.code
            raise
        last = chain[-1]
        status = status_of(last.data) if last.ended else "in_progress"
        if status in ("in_progress", "queued"):
            raise RequestError(f"The response {previous[:200]!r} has not ended: wait for its end.", PREVIOUS)
        if status == "failed":
            raise RequestError(f"The response {previous[:200]!r} failed: continue the one before it.", PREVIOUS)
        return self._joined([item for one in chain for item in _items(one)], PREVIOUS)

    def _joined(self, items: list[msgspec.Raw], field: str) -> bytes:
        """A JSON list. Raises a 413 if it is larger than a body may be."""
        if sum(len(item) for item in items) > self._max_bytes:
            said = f"The stored items have more than the {self._max_bytes} bytes of --max-body-bytes."
            raise RequestError(said, field, status=413)
        return b"[%b]" % b",".join(items)

    async def _referenced(self, references: dict[int, str], tenant: str) -> bytes:
        """The items of these ids as a JSON list; each id is in this place of the input. Raises a 404."""
        found: dict[str, msgspec.Raw] = {}
        for place, item_id in references.items():
            response_id = response_of_item(item_id)
            if item_id not in found and response_id:
                with contextlib.suppress(RequestError):
                    one = await self.get(response_id, tenant)
                    found |= {_decode_item(item).id: item for item in _items(one)}
            if item_id not in found:
                said = f"There is no stored item {item_id[:200]!r}."
                raise RequestError(said, f"input[{place}].id", status=404, code="item_not_found")
        return self._joined([found[item_id] for item_id in references.values()], "input")

    async def _chain(self, response_id: str, tenant: str, is_whole: bool) -> list[StoredResponse]:
        """A response behind the earlier ones. `is_whole`: an earlier one that is gone is an error."""
        found: list[StoredResponse] = []
        seen = set()
        while response_id or not found:
            if response_id in seen:
                said = f"the response {response_id[:200]!r} comes before itself in its conversation"
                raise RequestError(said, PREVIOUS)
            seen.add(response_id)
            try:
                one = await self.get(response_id, tenant)
            except RequestError:
                if found and not is_whole:
                    break
                raise
            found.append(one)
            response_id = one.previous
        found.reverse()
        return found


def _items(response: StoredResponse) -> list[msgspec.Raw]:
    """The input and the answer of a response."""
    return _raw_list(response.input_items) + output_of(response.data)


def _references(given: msgspec.Raw) -> dict[int, str]:
    """The ids of the references to stored items, by their places in the input."""
    if not bytes(given).startswith(b"["):
        return {}
    items = msgspec.json.decode(given, type=list[_AskedItem])
    return {i: item.id for i, item in enumerate(items) if item.type == REFERENCE and isinstance(item.id, str)}


def _raw_list(items: bytes) -> list[msgspec.Raw]:
    return msgspec.json.decode(items, type=list[msgspec.Raw])


def _error(frame: ResponseQuery, error: RequestError) -> ResponseReply:
    return ResponseReply(
        frame.request_id, status=error.status, message=str(error), field=error.field, code=error.code or ""
    )
