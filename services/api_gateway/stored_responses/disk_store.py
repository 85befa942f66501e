"""Responses in SQLite: the folder of --response-store, which all gateways of a host share.

Each gateway holds the lock of a file while it lives, and the kernel frees the lock of a process that is killed. A
response in progress has failed if its gateway is gone.
"""

import fcntl
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from blockyard.services.api_gateway.stored_responses.response_store import StoreLimits, num_bytes
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import StoredResponse

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT NOT NULL, data BLOB NOT NULL, input_items BLOB NOT NULL,
    events BLOB NOT NULL, background INTEGER NOT NULL, streams INTEGER NOT NULL, ended INTEGER NOT NULL,
    gateway TEXT NOT NULL, size INTEGER NOT NULL, used_at REAL NOT NULL)
"""
INDEX = "CREATE INDEX IF NOT EXISTS by_use ON responses (ended, used_at, size)"
COLUMNS = "id, tenant, previous, data, input_items, background, streams, ended"
BUSY_S = 10.0  # to wait for another gateway's write
RENEW_S = 1.0  # the time of a response is written at most this often
DIED = "The gateway process that generated this response ended before it; send the request again."


class DiskStore:
    """Raises RequestError (507) if the disk fails."""

    is_shared = True

    def __init__(self, folder: Path, limits: StoreLimits, gateway: int, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError if the folder cannot be used."""
        self._limits, self._gateway, self._clock = limits, f"{gateway:016x}", clock
        self._locks = folder / "gateways"
        try:
            self._locks.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own_lock = (self._locks / self._gateway).open("ab")
        except OSError as e:
            raise ConfigError(f"--response-store {folder}: {e}") from e
        try:
            fcntl.flock(self._own_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = sqlite3.connect(folder / "responses.sqlite", timeout=BUSY_S, isolation_level=None)
            for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", SCHEMA, INDEX):
                self._db.execute(statement)
        except (OSError, sqlite3.Error) as e:
            self._own_lock.close()
            raise ConfigError(f"--response-store {folder}: {e}") from e

    def put(self, response: StoredResponse, events: bytes = b"") -> None:
        one, size = response, num_bytes(response, events)
        self._execute(
            f"INSERT OR REPLACE INTO responses ({COLUMNS}, events, gateway, size, used_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(one.response_id, one.tenant, one.previous, one.data, one.input_items),
            *(one.background, one.streams, one.ended, events, self._gateway, size, self._clock()),
        )
        self._shrink()

    def get(self, response_id: str) -> StoredResponse | None:
        now = self._clock()
        row = self._execute(f"SELECT {COLUMNS}, gateway, used_at FROM responses WHERE id = ?", response_id).fetchone()
        if row is None:
            return None
        *fields, gateway, used_at = row
        response = _response(fields)
        if response.ended and now - used_at > self._limits.ttl_s:
            self.delete(response_id)
            return None
        if not response.ended and self._is_dead(gateway):
            return self._failed(response)
        if now - used_at > RENEW_S:
            self._execute("UPDATE responses SET used_at = ? WHERE id = ?", now, response_id)
        return response

    def events(self, response_id: str) -> bytes:
        row = self._execute("SELECT events FROM responses WHERE id = ?", response_id).fetchone()
        return b"" if row is None else bytes(row[0])

    def delete(self, response_id: str) -> None:
        self._execute("DELETE FROM responses WHERE id = ?", response_id)

    def sweep(self) -> None:
        """Drops expired responses, and ends responses of gateways that are gone."""
        self._execute("DELETE FROM responses WHERE ended = 1 AND used_at < ?", self._clock() - self._limits.ttl_s)
        gateways = self._execute("SELECT DISTINCT gateway FROM responses WHERE ended = 0").fetchall()
        dead = [gateway for (gateway,) in gateways if self._is_dead(gateway)]
        for gateway in dead:
            query = f"SELECT {COLUMNS} FROM responses WHERE ended = 0 AND gateway = ?"
            for row in self._execute(query, gateway).fetchall():
                self._failed(_response(row))
        for lock in self._locks.iterdir():
            if self._is_dead(lock.name):
                lock.unlink(missing_ok=True)

    def close(self) -> None:
        self._db.close()
        (self._locks / self._gateway).unlink(missing_ok=True)
        self._own_lock.close()

    def _is_dead(self, gateway: str) -> bool:
        if gateway == self._gateway:
            return False
        try:
            with (self._locks / gateway).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True

    def _failed(self, response: StoredResponse) -> StoredResponse:
        answer = msgspec.json.decode(response.data)
        answer |= {"status": "failed", "error": {"code": "server_error", "message": DIED}}
        response = msgspec.structs.replace(response, data=msgspec.json.encode(answer), ended=True)
        self._execute(
            "UPDATE responses SET data = ?, ended = 1, used_at = ? WHERE id = ? AND NOT ended",
            *(response.data, self._clock(), response.response_id),
        )
        return response

    def _shrink(self) -> None:
        """Drops the least recently used responses beyond a bound."""
        num, size = self._execute("SELECT COUNT(*), TOTAL(size) FROM responses").fetchone()
        limits = self._limits
        while num > limits.max_responses or size > limits.max_bytes:
            oldest = self._execute("SELECT id, size FROM responses WHERE ended = 1 ORDER BY used_at LIMIT 1").fetchone()
            if oldest is None:
                return
            self.delete(oldest[0])
            num, size = num - 1, size - oldest[1]

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as e:
            said = f"The server cannot keep responses in --response-store: {e}"
            raise RequestError(said, status=507, retry_after_s=60.0) from e


def _response(row: Sequence[Any]) -> StoredResponse:
    """Of the values of `COLUMNS`."""
    response_id, tenant, previous, data, input_items, background, streams, ended = row
    flags = bool(background), bool(streams), bool(ended)
    return StoredResponse(response_id, tenant, previous, data, input_items, *flags)
