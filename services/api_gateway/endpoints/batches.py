"""/v1/batches: files of requests that are answered behind all online requests."""

import secrets
import time
from collections.abc import Iterator

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.batch_api.objects import WINDOW_S, BatchList, BatchObject, CreateBatch
from blockyard.services.api_gateway.batch_api.store import BatchStore
from blockyard.services.api_gateway.batches.batch_lines import BY_URL
from blockyard.services.api_gateway.endpoints.files import enabled, integer_of
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import TENANT
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.responses.json_response import json_response
from blockyard.shared.errors import RequestError

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # pairs, and characters
MAX_LISTED = 100
PURPOSE = "batch"


class BatchEndpoints:
    def __init__(self, store: BatchStore | None, uploads: Uploads) -> None:
        """`store`: None: the server was started without --batch-dir."""
        self._store, self._uploads = store, uploads

    def routes(self) -> Iterator[Route]:
        yield Route("POST", "/v1/batches", self.create, Access.KEY)
        yield Route("GET", "/v1/batches", self.list, Access.KEY)
        yield Route("GET", "/v1/batches/{batch_id}", self.retrieve, Access.KEY)
        yield Route("POST", "/v1/batches/{batch_id}/cancel", self.cancel, Access.KEY, body_type="")

    async def create(self, request: web.Request) -> web.Response:
        """Makes a batch of an uploaded file. Its lines are answered behind all online requests."""
        async with self._uploads.read(request) as body:
            asked = _read(body)
        tenant = TENANT.get()
        with enabled(self._store) as store:
            file = store.file(tenant, asked.input_file_id)
            if file.purpose != PURPOSE:
                raise RequestError(f"the purpose of {file.id} is {file.purpose}, not {PURPOSE}", "input_file_id")
            now = int(time.time())
            batch = BatchObject(
                id=f"batch_{secrets.token_hex(16)}",
                endpoint=asked.endpoint,
                input_file_id=file.id,
                completion_window=asked.completion_window,
                created_at=now,
                expires_at=now + WINDOW_S,
                metadata=asked.metadata,
                output_expires_after=asked.output_expires_after,
            )
            store.add_batch(tenant, batch)
        return json_response(batch)

    async def list(self, request: web.Request) -> web.Response:
        """The batches of the key, the newest first; `after` an id, at most `limit`."""
        limit = integer_of(request, "limit", 20, MAX_LISTED)
        with enabled(self._store) as store:
            found = store.batches(TENANT.get(), request.query.get("after"), limit + 1)
        shown = found[:limit]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return json_response(BatchList(shown, first, last, len(found) > limit))

    async def retrieve(self, request: web.Request) -> web.Response:
        """A batch, with how many of its lines are answered and how many failed."""
        with enabled(self._store) as store:
            return json_response(store.batch(TENANT.get(), request.match_info["batch_id"]))

    async def cancel(self, request: web.Request) -> web.Response:
        """Ends a batch; its files have the answers so far."""
        with enabled(self._store) as store:
            return json_response(store.update_batch(TENANT.get(), request.match_info["batch_id"], _cancelled))


def _cancelled(batch: BatchObject) -> BatchObject:
    if batch.status in ("cancelling", "finalizing"):
        return batch
    return msgspec.structs.replace(batch, status="cancelling", cancelling_at=int(time.time()))


def _read(body: bytes) -> CreateBatch:
    """Raises RequestError."""
    try:
        asked = msgspec.json.decode(body, type=CreateBatch)
    except msgspec.ValidationError as e:
        text = str(e)
        named = text.partition("`$.")[2].partition("`")[0] or text.partition("missing required field `")[2][:-1]
        raise RequestError(text, named) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RequestError(f"the body is no JSON object: {e}", "body") from e
    if asked.endpoint not in BY_URL:
        raise RequestError(f"endpoint must be one of {', '.join(BY_URL)}, got {asked.endpoint[:100]!r}", "endpoint")
    pairs = asked.metadata or {}
    if len(pairs) > MAX_METADATA or any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in pairs.items()):
        raise RequestError(
            f"at most {MAX_METADATA} pairs, of keys of {MAX_KEY} and values of {MAX_VALUE} characters", "metadata"
        )
    return asked
