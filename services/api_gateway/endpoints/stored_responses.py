"""/v1/responses/ID: stored responses, their items, and background responses."""

from collections.abc import Iterator

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.apis.responses.api import RESPONSES
from blockyard.services.api_gateway.apis.responses.schemas import INCLUDABLE
from blockyard.services.api_gateway.endpoints.files import integer_of
from blockyard.services.api_gateway.endpoints.followed_responses import FollowedResponses
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import TENANT
from blockyard.services.api_gateway.responses.json_response import JSON, json_response
from blockyard.services.api_gateway.stored_responses.stored_responses import StoredResponses
from blockyard.shared.errors import RequestError

MAX_LISTED = 100
BOOLS = {"true": True, "1": True, "false": False, "0": False}
PATH = "/v1/responses/{response_id}"


class ItemList(msgspec.Struct, frozen=True):
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class _Item(msgspec.Struct):
    id: str


class StoredResponseEndpoints:
    def __init__(self, stored: StoredResponses, following: FollowedResponses) -> None:
        self._stored, self._following = stored, following

    def routes(self) -> Iterator[Route]:
        yield Route("GET", PATH, self.retrieve, Access.KEY, RESPONSES)
        yield Route("DELETE", PATH, self.delete, Access.KEY, RESPONSES)
        yield Route("GET", f"{PATH}/input_items", self.input_items, Access.KEY, RESPONSES)
        yield Route("POST", f"{PATH}/cancel", self.cancel, Access.KEY, RESPONSES, body_type="")

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """A stored response; with `stream=true` the events of a background one, behind number `starting_after`."""
        _check_include(request)
        response_id, after = request.match_info["response_id"], _starting_after(request)
        if _bool_of(request, "stream"):
            return await self._following.follow(request, response_id, after)
        found = await self._stored.get(response_id, TENANT.get())
        return web.Response(body=found.data, content_type=JSON)

    async def delete(self, request: web.Request) -> web.Response:
        """Removes a stored response. A background response that runs is cancelled."""
        response_id = request.match_info["response_id"]
        await self._stored.delete(response_id, TENANT.get())
        return json_response(DeletedResponse(response_id))

    async def input_items(self, request: web.Request) -> web.Response:
        """The items that a response was generated from: `after` an item's id, at most `limit`, in an `order`."""
        _check_include(request)
        limit = integer_of(request, "limit", 20, MAX_LISTED)
        order, after = request.query.get("order", "desc"), request.query.get("after")
        if order not in ("asc", "desc"):
            raise RequestError(f"order is asc or desc, got {order[:40]!r}", "order")
        items = await self._stored.input_items(request.match_info["response_id"], TENANT.get())
        if order == "desc":
            items.reverse()
        ids = [msgspec.json.decode(item, type=_Item).id for item in items]
        begin = 0
        if after is not None:
            if after not in ids:
                raise RequestError(f"`after` is the id of no item of this response: {after[:100]!r}", "after")
            begin = ids.index(after) + 1
        shown, shown_ids = items[begin : begin + limit], ids[begin : begin + limit]
        first, last = (shown_ids[0], shown_ids[-1]) if shown_ids else (None, None)
        return json_response(ItemList(shown, first, last, len(items) > begin + limit))

    async def cancel(self, request: web.Request) -> web.Response:
        """Ends a background response; one that has ended stays as it is."""
        found = await self._stored.cancel(request.match_info["response_id"], TENANT.get())
        return web.Response(body=found.data, content_type=JSON)


def _check_include(request: web.Request) -> None:
    """What a response includes is settled when it is created. Raises RequestError for unknown values."""
    for name in ("include", "include[]"):
        for value in request.query.getall(name, []):
            for one in value.split(","):
                if one not in INCLUDABLE:
                    raise RequestError(f"include has one of {', '.join(INCLUDABLE)}, got {one[:80]!r}", "include")


def _bool_of(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "false").lower()
    if value not in BOOLS:
        raise RequestError(f"{name} is true or false, got {value[:40]!r}", name)
    return BOOLS[value]


def _starting_after(request: web.Request) -> int:
    """The number of the last event that the client has; -1: none."""
    text = request.query.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise RequestError(f"starting_after is the number of an event, got {text[:40]!r}", "starting_after")
    return int(text)
