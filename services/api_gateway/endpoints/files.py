"""/v1/files: the inputs and outputs of batches."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from blockyard.services.api_gateway.batch_api.objects import DeletedFile, ExpiresAfter, FileList, FileObject
from blockyard.services.api_gateway.batch_api.store import BatchStore
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import TENANT
from blockyard.services.api_gateway.responses.json_response import json_response
from blockyard.shared.errors import BatchError, RequestError

log = logging.getLogger(__name__)

MAX_FIELD_BYTES = 4096  # of a field that is no file
MAX_NAME = 255
MAX_LISTED = 10_000
PURPOSES = ("batch",)
FORM = "multipart/form-data"
WRITE_BYTES = 2**18


class FileEndpoints:
    def __init__(self, store: BatchStore | None, max_bytes: int, timeout_s: float) -> None:
        """`store`: None: the server was started without --batch-dir. `timeout_s`: between two pieces of an upload."""
        self._store, self._max_bytes, self._timeout_s = store, max_bytes, timeout_s

    def routes(self) -> Iterator[Route]:
        yield Route("POST", "/v1/files", self.upload, Access.KEY, body_type=FORM)
        yield Route("GET", "/v1/files", self.list, Access.KEY)
        yield Route("GET", "/v1/files/{file_id}", self.retrieve, Access.KEY)
        yield Route("DELETE", "/v1/files/{file_id}", self.delete, Access.KEY)
        yield Route("GET", "/v1/files/{file_id}/content", self.content, Access.KEY)

    async def upload(self, request: web.Request) -> web.Response:
        """Takes a file of a batch: a form with `purpose` and `file`, and `expires_after[anchor]` and `[seconds]`."""
        with enabled(self._store) as store:
            if request.content_length is not None and request.content_length > self._max_bytes + MAX_FIELD_BYTES:
                raise self._too_large()
            path = store.upload_path()
            try:
                fields = await self._receive(request, str(path))
                if "filename" not in fields:
                    raise RequestError("the form has no file", "file")
                if (purpose := fields.get("purpose", "")) not in PURPOSES:
                    raise RequestError(f"purpose must be {' or '.join(PURPOSES)}, got {purpose[:40]!r}", "purpose")
                expires = _expires_after(fields)
                return json_response(store.add_upload(TENANT.get(), path, fields["filename"], purpose, expires))
            finally:
                path.unlink(missing_ok=True)

    async def list(self, request: web.Request) -> web.Response:
        """The files of the key; `after` an id, at most `limit`, in an `order`, of one `purpose`."""
        limit, order = integer_of(request, "limit", MAX_LISTED, MAX_LISTED), request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {order[:40]!r}", "order")
        query = request.query
        with enabled(self._store) as store:
            found = store.files(TENANT.get(), query.get("after"), limit + 1, order == "desc", query.get("purpose", ""))
        shown = found[:limit]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return json_response(FileList(shown, first, last, len(found) > limit))

    async def retrieve(self, request: web.Request) -> web.Response:
        """Returns the object of a file."""
        with enabled(self._store) as store:
            return json_response(self._file(store, request))

    async def delete(self, request: web.Request) -> web.Response:
        """Removes a file that no open batch reads."""
        file_id = request.match_info["file_id"]
        with enabled(self._store) as store:
            store.delete_file(TENANT.get(), file_id)
        return json_response(DeletedFile(file_id))

    async def content(self, request: web.Request) -> web.StreamResponse:
        """The bytes of a file."""
        with enabled(self._store) as store:
            path = store.path(self._file(store, request).id)
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    def _file(self, store: BatchStore, request: web.Request) -> FileObject:
        return store.file(TENANT.get(), request.match_info["file_id"])

    async def _receive(self, request: web.Request, path: str) -> dict[str, str]:
        """Writes the form's file to a path. Returns the other fields, and the file's name as `filename`."""
        fields: dict[str, str] = {}
        try:
            form = await request.multipart()
            while True:
                async with asyncio.timeout(self._timeout_s):
                    part = await form.next()
                if part is None:
                    return fields
                if not isinstance(part, BodyPartReader):
                    raise RequestError("a part of the form is a form itself", "body")
                if part.name == "file":
                    fields["filename"] = (part.filename or "file")[:MAX_NAME]
                    await self._write(part, path)
                elif part.name:
                    fields[part.name] = await self._text(part)
        except TimeoutError as e:
            raise RequestError(f"nothing arrived for {self._timeout_s:g} s", "body", status=408) from e
        except (ValueError, AssertionError, LookupError) as e:
            if isinstance(e, RequestError):
                raise
            raise RequestError(f"the body is no form: {e}", "body") from e
        except BadHttpMessage as e:
            raise RequestError("the head of a part of the form is malformed", "body") from e

    async def _write(self, part: BodyPartReader, path: str) -> None:
        size, pieces = 0, bytearray()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    piece = await part.read_chunk(WRITE_BYTES)
                size += len(piece)
                if size > self._max_bytes:
                    raise self._too_large()
                pieces += piece
                if len(pieces) >= WRITE_BYTES or not piece:
                    file.write(pieces)
                    pieces.clear()
                    await asyncio.sleep(0)
                if not piece:
                    return

    async def _text(self, part: BodyPartReader) -> str:
        data = bytearray()
        while True:
            async with asyncio.timeout(self._timeout_s):
                piece = await part.read_chunk(MAX_FIELD_BYTES)
            data += piece
            if len(data) > MAX_FIELD_BYTES:
                raise RequestError(f"the field {part.name} is longer than {MAX_FIELD_BYTES} bytes", part.name or "")
            if not piece:
                return data.decode("utf-8", "replace")

    def _too_large(self) -> RequestError:
        return RequestError(f"a file may have {self._max_bytes} bytes (--max-file-bytes)", "file", status=413)


def _expires_after(fields: dict[str, str]) -> ExpiresAfter | None:
    """Raises RequestError."""
    said = {name: fields[key] for name in ("anchor", "seconds") if (key := f"expires_after[{name}]") in fields}
    if not said:
        return None
    try:
        return msgspec.convert(said, ExpiresAfter, strict=False)
    except msgspec.ValidationError as e:
        raise RequestError(f"expires_after: {e}", "expires_after") from e


@contextmanager
def enabled(store: BatchStore | None) -> Iterator[BatchStore]:
    """The store; its failures are 507s inside the block. Raises a 404 without a store."""
    if store is None:
        raise RequestError("This server keeps no files and batches: start it with --batch-dir DIR.", status=404)
    try:
        yield store
    except BatchError as e:
        log.error("%s", e)
        raise RequestError(f"The server cannot write its records: {e.cause}", status=507, retry_after_s=60.0) from e
    except OSError as e:
        raise RequestError(f"The server cannot keep files: {e.strerror or e}", status=507, retry_after_s=60.0) from e


def integer_of(request: web.Request, name: str, default: int, most: int) -> int:
    """An integer of the query, from 1 to `most`. Raises RequestError."""
    text = request.query.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise RequestError(f"{name} must be an integer from 1 to {most}, got {text[:40]!r}", name)
    return int(text)
