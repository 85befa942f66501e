"""Endpoints for operators: pause and resume, sleep and wake up, reset the prefix cache, abort requests."""

from collections.abc import Iterator

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.requests.schemas import decode
from blockyard.services.api_gateway.responses.json_response import json_response
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Control, Controlled, ControlVerb, MemoryTag
from blockyard.shared.ring_client.controls import ControlClient

SWITCH = {"": True, "1": True, "true": True, "0": False, "false": False}


class State(msgspec.Struct, frozen=True):
    """The state after the operation."""

    sleep_level: int
    paused: bool
    freed_bytes: int


class IsSleeping(msgspec.Struct, frozen=True):
    is_sleeping: bool


class IsPaused(msgspec.Struct, frozen=True):
    is_paused: bool


class AbortRequests(msgspec.Struct, frozen=True):
    request_ids: list[str]  # of answers, as clients see them


class Aborted(msgspec.Struct, frozen=True):
    num_aborted: int


class OperatorEndpoints:
    def __init__(self, controls: ControlClient, pipeline: RequestPipeline, uploads: Uploads) -> None:
        self._controls, self._pipeline, self._uploads = controls, pipeline, uploads

    def routes(self) -> Iterator[Route]:
        yield Route("POST", "/reset_prefix_cache", self.reset_prefix_cache, Access.OPERATOR)
        yield Route("POST", "/pause", self.pause, Access.OPERATOR)
        yield Route("POST", "/resume", self.resume, Access.OPERATOR)
        yield Route("POST", "/abort_requests", self.abort_requests, Access.OPERATOR)
        yield Route("POST", "/sleep", self.sleep, Access.OPERATOR)
        yield Route("POST", "/wake_up", self.wake_up, Access.OPERATOR)
        yield Route("GET", "/is_sleeping", self.is_sleeping, Access.KEY)
        yield Route("GET", "/is_paused", self.is_paused, Access.KEY)

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Empties the prefix cache."""
        _check_query(request)
        return await self._do(Control("", ControlVerb.RESET_PREFIX_CACHE))

    async def pause(self, request: web.Request) -> web.Response:
        """With `mode=keep` running requests stop where they are; with `wait` they finish before the answer is sent."""
        _check_query(request, "mode", "clear_cache")
        mode = request.query.get("mode", "keep")
        if mode not in ("keep", "wait"):
            raise RequestError(f"mode must be keep or wait, got {mode[:40]!r}", "mode")
        clear = SWITCH.get(request.query.get("clear_cache", "true").lower())
        if clear is None:
            raise RequestError("clear_cache must be true or false", "clear_cache")
        return await self._do(Control("", ControlVerb.PAUSE, drain=mode == "wait", clear_cache=clear))

    async def resume(self, request: web.Request) -> web.Response:
        """Requests go on after a pause."""
        _check_query(request)
        return await self._do(Control("", ControlVerb.RESUME))

    async def abort_requests(self, request: web.Request) -> web.Response:
        """Ends the requests with these answer ids that are open at this gateway."""
        _check_query(request)
        async with self._uploads.read(request) as body:
            asked, _ = decode(body, AbortRequests, strict=True)
        return json_response(Aborted(self._pipeline.abort(set(asked.request_ids))))

    async def sleep(self, request: web.Request) -> web.Response:
        """Frees the memory of weights (level 1 keeps them on the host) and KV. Requests wait; a full queue is a 503."""
        _check_query(request, "level")
        level = request.query.get("level", "1")
        if level not in ("1", "2"):
            raise RequestError(f"level must be 1 or 2, got {level[:40]!r}", "level")
        return await self._do(Control("", ControlVerb.SLEEP, level=int(level)))

    async def wake_up(self, request: web.Request) -> web.Response:
        """`tags` restores only weights or kv_cache; workers sleep until both are restored."""
        _check_query(request, "tags")
        given = [tag for value in request.query.getall("tags", []) for tag in value.split(",")]
        if wrong := [tag for tag in given if tag not in list(MemoryTag)]:
            raise RequestError(f"tags are weights and kv_cache, got {wrong[0][:40]!r}", "tags")
        return await self._do(Control("", ControlVerb.WAKE_UP, tags=sorted(set(map(MemoryTag, given)))))

    async def is_sleeping(self, request: web.Request) -> web.Response:
        """Whether a worker sleeps."""
        answers = await self._controls.ask(Control("", ControlVerb.STATUS))
        return json_response(IsSleeping(any(a.sleep_level for a in answers)))

    async def is_paused(self, request: web.Request) -> web.Response:
        """Whether requests are paused."""
        answers = await self._controls.ask(Control("", ControlVerb.STATUS))
        return json_response(IsPaused(any(a.paused for a in answers)))

    async def _do(self, control: Control) -> web.Response:
        return json_response(_state(await self._controls.ask(control)))


def _state(answers: list[Controlled]) -> State:
    """The answers of all models in one."""
    return State(
        max(a.sleep_level for a in answers), any(a.paused for a in answers), sum(a.freed_bytes for a in answers)
    )


def _check_query(request: web.Request, *known: str) -> None:
    """Raises RequestError for an unknown query field."""
    for name in request.query:
        if name not in known:
            raise RequestError(f"{request.path} takes no {name[:40]!r}", name[:40])
