"""Background responses: generated without a connection, from their request to the record of their end."""

import asyncio
import logging
import secrets
import sys
from contextlib import AbstractContextManager
from typing import cast

import msgspec

from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.responses.api import ResponsesEvents
from blockyard.services.api_gateway.apis.responses.response_object import QUEUED, STARTED
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest
from blockyard.services.api_gateway.responses.http_generation import HttpGeneration
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, UnreadText
from blockyard.services.api_gateway.stored_responses.event_log import EventLog
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import StoredResponse

log = logging.getLogger(__name__)

CANCELLED = RequestError("The response was cancelled.", status=499, code="response_cancelled")
STOPPED = RequestError("The server was shut down before the response ended.", status=503)
BROKEN = RequestError("The server failed at this request.", status=500)


class _LogTransport:
    """Takes the bytes of a `ResponseWriter` in place of a connection, at any speed."""

    def __init__(self, events: EventLog | None) -> None:
        """None: the events have no reader."""
        self._events = events

    def write(self, data: bytes) -> None:
        if self._events is not None:
            self._events.append(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        """Nothing is unread."""


class BackgroundResponse:
    """One of them, while it is in progress."""

    def __init__(self, api: Api, request: GenerateRequest, record: StoredResponse) -> None:
        self._api, self._request, self._record = api, request, record
        self._events = cast(ResponsesEvents, api.events(request.options))  # later the generation's
        self._generation: HttpGeneration | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self.log = EventLog() if record.streams else None
        self._transport = _LogTransport(self.log)
        self.done = asyncio.Event()

    @property
    def tenant(self) -> str:
        return self._record.tenant

    def record(self) -> StoredResponse:
        """Returns its object as of now."""
        if self._events.final:
            return msgspec.structs.replace(self._record, data=self._events.final, ended=True)
        state = QUEUED if self._generation is None else STARTED
        return msgspec.structs.replace(self._record, data=self._events.so_far(state))

    async def run(self, pipeline: RequestPipeline, counted: AbstractContextManager[object]) -> None:
        """Generates the answer. Afterwards `record` is final, whatever happened."""
        self._task = asyncio.current_task()
        try:
            with counted:
                await self._generate(pipeline)
        except RequestError as e:
            self._fail(e)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                self._fail(STOPPED)
                raise
            self._cancelled()
        except Exception:  # a bug: the others go on
            log.exception("%s failed", self._record.response_id)
            self._fail(BROKEN)
        finally:
            if self.log is not None:
                self.log.end()
            self.done.set()

    def cancel(self) -> None:
        """Ends it; `done` is set soon after."""
        self._is_cancelled = True
        if self._generation is not None:
            self._generation.fail(CANCELLED)
        elif self._task is not None:
            self._task.cancel()

    async def _generate(self, pipeline: RequestPipeline) -> None:
        writer = ResponseWriter(UnreadText(sys.maxsize))
        if self._is_cancelled:  # before it began
            self._cancelled()
            return
        tenant, name = self._record.tenant, secrets.token_hex(10)
        generation = await pipeline.open(self._api, self._request, name, tenant, writer)
        self._generation, self._events = generation, cast(ResponsesEvents, generation.events)
        now = asyncio.get_running_loop().time
        try:
            writer.start(cast(asyncio.WriteTransport, self._transport), False, now())
            await generation.wait_finished()
            if generation.error is CANCELLED:
                self._transport.write(self._events.cancelled())
            else:
                self._transport.write(generation.ending())
        finally:
            pipeline.close(generation)

    def _fail(self, error: RequestError) -> None:
        """The answer ends with this error, behind the events that it has."""
        if not self._events.final:
            self._begin()
            self._transport.write(self._events.failed(error))

    def _cancelled(self) -> None:
        if not self._events.final:
            self._begin()
            self._transport.write(self._events.cancelled())

    def _begin(self) -> None:
        if self._generation is None:  # nothing has written the first events
            self._transport.write(self._events.opening(None))
