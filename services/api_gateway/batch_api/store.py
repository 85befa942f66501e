"""The folder of --batch-dir: records of files and batches in SQLite, and the files.

Several gateways of one host may use it at a time. Everything belongs to a tenant, and is unknown to others.
"""

import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from blockyard.services.api_gateway.batch_api.objects import BatchObject, ExpiresAfter, FileObject
from blockyard.shared.errors import BatchError, ConfigError, RequestError

SCHEMA = """
CREATE TABLE IF NOT EXISTS {table} (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    status TEXT NOT NULL, created_at INTEGER NOT NULL, data BLOB NOT NULL)
"""
BUSY_S = 10.0  # to wait for another gateway's write
UPLOAD_S = 24 * 3600.0  # after which an upload that did not end is removed

Stored = TypeVar("Stored", FileObject, BatchObject)


class BatchStore:
    """Raises RequestError for what a client asked, and BatchError if the disk fails."""

    def __init__(self, folder: Path, retention_s: float) -> None:
        """Raises ConfigError if the folder cannot be used."""
        self._folder, self.retention_s = folder, retention_s
        try:
            for name in ("files", "locks", "uploads"):
                (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(folder / "batches.sqlite", timeout=BUSY_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            for table in ("files", "batches"):
                self._db.execute(SCHEMA.format(table=table))
        except (OSError, sqlite3.Error) as e:
            raise ConfigError(f"--batch-dir {folder}: {e}") from e

    def close(self) -> None:
        self._db.close()

    # files

    def path(self, file_id: str) -> Path:
        return self._folder / "files" / file_id

    def upload_path(self) -> Path:
        """A new place for an upload that is not complete."""
        return self._folder / "uploads" / secrets.token_hex(16)

    def add_upload(
        self, tenant: str, upload: Path, filename: str, purpose: str, expires: ExpiresAfter | None = None
    ) -> FileObject:
        """Takes over a complete upload."""
        file_id = f"file-{secrets.token_hex(16)}"
        os.replace(upload, self.path(file_id))
        return self.add_file(tenant, file_id, filename, purpose, expires)

    def add_file(
        self, tenant: str, file_id: str, filename: str, purpose: str, expires: ExpiresAfter | None = None
    ) -> FileObject:
        """Makes the record of a file that is at its path; a second call replaces it."""
        now, kept_s = int(time.time()), int(self.retention_s)
        until = now + (kept_s if expires is None else min(kept_s, expires.seconds))
        file = FileObject(file_id, self.path(file_id).stat().st_size, now, filename, purpose, until)
        self._put("files", file, tenant, file.purpose)
        return file

    def file(self, tenant: str, file_id: str) -> FileObject:
        """Raises a 404."""
        return self._get("files", FileObject, tenant, file_id, "file")

    def files(self, tenant: str, after: str | None, limit: int, descends: bool, purpose: str) -> list[FileObject]:
        return self._list("files", FileObject, tenant, after, limit, descends, purpose)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises a 404, and a 409 while a batch reads the file."""
        self.file(tenant, file_id)
        if any(batch.input_file_id == file_id for _, batch in self.open_batches()):
            raise RequestError(f"A batch that has not ended reads {file_id}.", "file_id", status=409)
        self._remove_file(file_id)

    # batches

    def add_batch(self, tenant: str, batch: BatchObject) -> None:
        self._put("batches", batch, tenant, batch.status)

    def batch(self, tenant: str, batch_id: str) -> BatchObject:
        """Raises a 404."""
        return self._get("batches", BatchObject, tenant, batch_id, "batch")

    def batches(self, tenant: str, after: str | None, limit: int) -> list[BatchObject]:
        """The newest first."""
        return self._list("batches", BatchObject, tenant, after, limit, True, "")

    def open_batches(self) -> list[tuple[str, BatchObject]]:
        """Batches that have not ended, of all tenants, the oldest first; each with its tenant."""
        rows = self._execute(
            "SELECT tenant, data FROM batches WHERE status NOT IN ('failed', 'completed', 'expired', 'cancelled')"
            " ORDER BY place"
        )
        return [(tenant, msgspec.json.decode(data, type=BatchObject)) for tenant, data in rows]

    def update_batch(self, tenant: str, batch_id: str, change: Callable[[BatchObject], BatchObject]) -> BatchObject:
        """Changes a batch while no other gateway can. Returns the new one. A batch that has ended is not changed."""
        with self._transaction():
            batch = self.batch(tenant, batch_id)
            if not batch.has_ended:
                batch = change(batch)
                data = msgspec.json.encode(batch)
                self._execute("UPDATE batches SET status = ?, data = ? WHERE id = ?", batch.status, data, batch_id)
        return batch

    @contextmanager
    def owned(self, batch_id: str) -> Iterator[bool]:
        """Whether this process owns the batch inside the block: no other gateway answers it."""
        path = self._folder / "locks" / batch_id
        try:
            with path.open("ab") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                    return
                yield True
        except OSError as e:
            raise BatchError(e.strerror or str(e), path) from e

    def sweep(self, now: float) -> None:
        """Removes files and ended batches that were kept for their time."""
        until = now - self.retention_s
        used = {batch.input_file_id for _, batch in self.open_batches()}
        expired = "created_at < ? OR json_extract(CAST(data AS TEXT), '$.expires_at') < ?"
        for (file_id,) in self._execute(f"SELECT id FROM files WHERE {expired}", until, now).fetchall():
            if file_id not in used:
                self._remove_file(file_id)
        ended = "status IN ('failed', 'completed', 'expired', 'cancelled')"
        for (batch_id,) in self._execute(f"SELECT id FROM batches WHERE created_at < ? AND {ended}", until).fetchall():
            self._execute("DELETE FROM batches WHERE id = ?", batch_id)
            (self._folder / "locks" / batch_id).unlink(missing_ok=True)
        for upload in (self._folder / "uploads").iterdir():
            if upload.stat().st_mtime < now - UPLOAD_S:
                upload.unlink(missing_ok=True)

    def _remove_file(self, file_id: str) -> None:
        self._execute("DELETE FROM files WHERE id = ?", file_id)
        self.path(file_id).unlink(missing_ok=True)

    def _put(self, table: str, stored: FileObject | BatchObject, tenant: str, status: str) -> None:
        values = (stored.id, tenant, status, stored.created_at, msgspec.json.encode(stored))
        self._execute(
            f"INSERT OR REPLACE INTO {table} (id, tenant, status, created_at, data) VALUES (?, ?, ?, ?, ?)", *values
        )

    def _get(self, table: str, kind: type[Stored], tenant: str, stored_id: str, name: str) -> Stored:
        row = self._execute(f"SELECT data FROM {table} WHERE id = ? AND tenant = ?", stored_id, tenant).fetchone()
        if row is None:
            raise RequestError(f"There is no {name} {stored_id[:100]!r}.", f"{name}_id", status=404, code="not_found")
        return msgspec.json.decode(row[0], type=kind)

    def _list(
        self, table: str, kind: type[Stored], tenant: str, after: str | None, limit: int, descends: bool, status: str
    ) -> list[Stored]:
        """Raises a 400 if there is nothing of the id `after`."""
        query = f"SELECT data FROM {table} WHERE tenant = ?"
        values: list[object] = [tenant]
        if status:
            query, values = f"{query} AND status = ?", [*values, status]
        if after is not None:
            row = self._execute(f"SELECT place FROM {table} WHERE id = ? AND tenant = ?", after, tenant).fetchone()
            if row is None:
                raise RequestError(f"`after` is the id of nothing: {after[:100]!r}", "after")
            query, values = f"{query} AND place {'<' if descends else '>'} ?", [*values, row[0]]
        rows = self._execute(f"{query} ORDER BY place {'DESC' if descends else 'ASC'} LIMIT ?", *values, limit)
        return [msgspec.json.decode(data, type=kind) for (data,) in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._execute("ROLLBACK")
            raise
        self._execute("COMMIT")

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as e:
            raise BatchError(str(e), self._folder / "batches.sqlite") from e
