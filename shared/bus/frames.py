"""Decodes frames from the wire. A malformed frame is counted and dropped; the log lines about them are bounded."""

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)

F = TypeVar("F")

LINES_A_MINUTE = 10
SENDERS_REMEMBERED = 1024
WORDS_CHARS = 200  # length limit of an error or a name in a log line: the sender may choose its text


class LogLimit:
    """Bounds the log lines that peers cause: one for each sender and cause, at most `LINES_A_MINUTE` a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: set[Hashable] = set()
        self._minute_began = clock()
        self._lines = 0

    def allows(self, cause: Hashable) -> bool:
        """Returns True if a line is to be written now."""
        if cause in self._logged:
            return False
        now = self._clock()
        if now - self._minute_began >= 60:
            self._minute_began, self._lines = now, 0
        if self._lines >= LINES_A_MINUTE:
            return False
        self._lines += 1
        if len(self._logged) >= SENDERS_REMEMBERED:
            self._logged.clear()
        self._logged.add(cause)
        return True


class Malformed:
    """Counts malformed frames. Logs each sender's first one, within the limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._limit = LogLimit(clock)

    def count(self, sender: int | bytes, error: object) -> None:
        """`sender` is an incarnation, or the routing id of a link without a Hello."""
        self.total += 1
        if self._limit.allows(sender):
            log.warning("dropped a malformed frame of %s (%d so far): %s", in_log(sender), self.total, in_log(error))


class FrameReader(Generic[F]):
    """Decodes the frames of one union of frame types."""

    def __init__(self, accepts: Any, malformed: Malformed) -> None:
        self._decode: Callable[[bytes], F] = msgspec.msgpack.Decoder(accepts).decode
        self.malformed = malformed

    def read(self, data: bytes, sender: int | bytes) -> F | None:
        """Returns None for a frame that does not decode, and counts it.

        msgspec raises its DecodeError, but UnicodeDecodeError for a string that is not UTF-8 and RecursionError
        for lists nested too deeply, also in fields that it skips.
        """
        try:
            return self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            self.malformed.count(sender, e)
            return None


def in_log(words: object) -> str:
    """Returns text from a peer as one short line of printable characters."""
    text = str(words)
    short = text if len(text) <= WORDS_CHARS else f"{text[:WORDS_CHARS]}..."
    return short.encode("unicode_escape").decode("ascii")
