"""The responses that this gateway keeps: in its store, and background responses that run."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import msgspec

from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.responses.api import failed_event
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest, StoreOptions
from blockyard.services.api_gateway.stored_responses.background import BackgroundResponse
from blockyard.services.api_gateway.stored_responses.event_log import EventLog
from blockyard.services.api_gateway.stored_responses.response_store import FIELD, ResponseStore, not_found
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import StoredResponse

log = logging.getLogger(__name__)

SWEEP_S = 5.0
STOPPING = RequestError("The server is shutting down.", status=503, retry_after_s=1.0)


class EventPage(NamedTuple):
    """Some events of a response."""

    data: bytes
    last: int  # number of the last one
    ended: bool  # none follows


class LocalResponses:
    """Everything belongs to a tenant, and is a 404 for others."""

    def __init__(
        self,
        store: ResponseStore,
        max_running: int,
        pipeline: RequestPipeline,
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`counted`: what a running response counts as until it ends, for draining."""
        self._store, self._max_running, self._pipeline, self._counted = store, max_running, pipeline, counted
        self._running: dict[str, BackgroundResponse] = {}
        self._deleted: set[str] = set()  # of running ones
        self._tasks: asyncio.TaskGroup | None = None  # while `run` runs

    async def run(self) -> None:
        """Runs background responses until it is cancelled, and then ends responses in progress with an error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    try:
                        self._store.sweep()
                    except RequestError as e:
                        log.error("%s", e)
                    await asyncio.sleep(SWEEP_S)
        finally:
            self._tasks = None
            self._store.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that raises nothing, until `run` is cancelled."""
        if self._tasks is None:
            work.close()
            raise STOPPING
        self._tasks.create_task(work)

    def keep(self, request: GenerateRequest, tenant: str, answer: bytes) -> None:
        """Stores an answer that has ended. If the disk fails the client has it all the same."""
        try:
            self._store.put(_record(request, tenant, answer, ended=True))
        except RequestError as e:
            log.error("%s is not stored: %s", request.options.answer_id, e)

    def start(self, api: Api, request: GenerateRequest, tenant: str) -> BackgroundResponse:
        """Starts a background response. Raises RequestError: a 429 if as many run as may be stored."""
        if self._tasks is None:
            raise STOPPING
        if len(self._running) >= self._max_running:
            raise RequestError("As many background responses run as may be stored.", status=429, retry_after_s=1.0)
        response_id = request.options.answer_id
        run = BackgroundResponse(api, request, _record(request, tenant, b"", ended=False))
        with ExitStack() as stack:
            stack.enter_context(self._counted())
            stack.enter_context(self._pipeline.counted(request))
            self._store.put(run.record())
            self.spawn(self._run(run, response_id, stack.pop_all()))
            self._running[response_id] = run
        return run

    async def _run(self, run: BackgroundResponse, response_id: str, counted: ExitStack) -> None:
        try:
            await run.run(self._pipeline, counted)
        finally:
            self._running.pop(response_id, None)
            if response_id in self._deleted:
                self._deleted.discard(response_id)
            else:
                try:
                    self._store.put(run.record(), run.log.packed() if run.log is not None else b"")
                except RequestError as e:
                    log.error("%s is not stored: %s", response_id, e)

    def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        """None: it is not here, or of another tenant."""
        run = None if response_id in self._deleted else self._running.get(response_id)
        found = self._store.get(response_id)  # renews its time
        if found is None or response_id in self._deleted:
            return None
        found = found if run is None else run.record()
        return found if found.tenant == tenant else None

    def has(self, response_id: str) -> bool:
        """Whether there is a response of this id, of any tenant."""
        return response_id in self._running or self._store.get(response_id) is not None

    async def cancel(self, response_id: str, tenant: str) -> StoredResponse:
        """Returns the background response with what it has. One that has ended stays as it is. Raises RequestError."""
        found = self.get(response_id, tenant)
        if found is None:
            raise not_found(response_id)
        if not found.background:
            raise RequestError("Only a background response can be cancelled.", FIELD)
        run = self._running.get(response_id)
        if run is None:
            return found
        run.cancel()
        await run.done.wait()
        return run.record()

    def delete(self, response_id: str, tenant: str) -> None:
        """Removes a response; one that runs is cancelled. Raises a 404."""
        if self.get(response_id, tenant) is None:
            raise not_found(response_id)
        run = self._running.get(response_id)
        if run is not None:
            self._deleted.add(response_id)
            run.cancel()
        self._store.delete(response_id)

    async def events(self, response_id: str, tenant: str, after: int, patience_s: float) -> EventPage:
        """Events behind number `after`: waits for some, but no longer than `patience_s`. Raises RequestError."""
        found = self.get(response_id, tenant)
        if found is None:
            raise not_found(response_id)
        if not found.streams:
            raise RequestError("Only a background response that was created with `stream` can be streamed.", "stream")
        run = self._running.get(response_id)
        if run is not None and run.log is not None:
            events = run.log
            _check_after(events, after)
            await events.wait(after, patience_s)
        elif packed := self._store.events(response_id):
            events = EventLog.unpacked(packed)
            _check_after(events, after)
        else:  # its gateway was killed
            return EventPage(failed_event(found.data, after + 1), after + 1, True)
        data, last = events.read(after)
        return EventPage(data, last, events.ended and last == events.last)


def _check_after(events: EventLog, after: int) -> None:
    if after > max(events.last, -1):
        said = f"starting_after is {after}, and the last event so far has the number {events.last}"
        raise RequestError(said, "starting_after")


def _record(request: GenerateRequest, tenant: str, data: bytes, ended: bool) -> StoredResponse:
    store = store_options(request)
    assert store is not None
    streams = store.background and request.options.stream
    found = StoredResponse(request.options.answer_id, tenant, store.previous, data, store.input_items)
    return msgspec.structs.replace(found, background=store.background, streams=streams, ended=ended)


def store_options(request: GenerateRequest) -> StoreOptions | None:
    """None: the answer is not stored."""
    return None if request.options.responses is None else request.options.responses.store
