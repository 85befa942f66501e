"""Which lines a batch has answered and read: on the disk, so that memory does not grow with the file."""

import enum
import hashlib
import sqlite3

from blockyard.services.api_gateway.batches.batch_lines import REPEATED, WrittenLine, WrongLine
from blockyard.shared.errors import BatchError

DIGEST_BYTES = 16


class Known(enum.IntEnum):
    """The states of a `custom_id`."""

    NEW = 0
    READ = 1  # a line of the input had it
    ANSWERED = 2  # the output had it at the start, and no line of the input since


class LineRecords:
    """A temporary database of digests: SQLite keeps 2 MB of it in memory. Its methods raise BatchError."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._execute("PRAGMA journal_mode = OFF")
        self._execute("PRAGMA synchronous = OFF")
        self._execute("CREATE TABLE ids (digest BLOB PRIMARY KEY, known INTEGER) WITHOUT ROWID")
        self._execute("CREATE TABLE reported (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def written(self, line: WrittenLine) -> None:
        """Takes a line that the output has at the start."""
        error = line.error
        if line.custom_id is not None and (error is None or error.code != REPEATED):
            self._note(line.custom_id, Known.ANSWERED)
        if error is not None and error.line is not None:
            digest = _place(line.custom_id, error.line)
            self._execute("INSERT OR IGNORE INTO reported VALUES (?)", digest)

    def read(self, custom_id: str) -> Known:
        """Takes the id of a line of the input. Returns the id's state before this line."""
        row = self._execute("SELECT known FROM ids WHERE digest = ?", _digest(custom_id)).fetchone()
        known = Known.NEW if row is None else Known(row[0])
        if known is not Known.READ:
            self._note(custom_id, Known.READ)
        return known

    def is_reported(self, wrong: WrongLine) -> bool:
        """Returns whether the output had this line's error at the start."""
        assert wrong.error.line is not None
        digest = _place(wrong.custom_id, wrong.error.line)
        return self._execute("SELECT 1 FROM reported WHERE digest = ?", digest).fetchone() is not None

    def close(self) -> None:
        self._db.close()

    def _note(self, custom_id: str, known: Known) -> None:
        self._execute("INSERT OR REPLACE INTO ids VALUES (?, ?)", _digest(custom_id), int(known))

    def _execute(self, statement: str, *values: bytes | int) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as e:
            raise BatchError(f"the temporary file of the batch's lines: {e}") from e


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _place(custom_id: str | None, number: int) -> bytes:
    return _digest(f"{number} {'' if custom_id is None else custom_id}")
