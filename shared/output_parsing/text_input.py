"""The text of one choice, read by a format from its first to its last character while it arrives."""

from collections.abc import Callable

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading, silent

SPACES = " \t\r\n"


def _any(text: str) -> bool:
    return True


class TextInput:
    """Text that has arrived, and the place up to which it is read.

    The methods that return a `Reading` are called with `yield from`. What they read and do not yield as a part is
    syntax of the format, which the client does not see. A format that has read syntax in vain goes back with `rewind`.
    """

    __slots__ = ("_at", "_base", "_before", "_data", "_ended", "_kept", "_kept_at_end")

    def __init__(self) -> None:
        self._data = ""
        self._at = 0
        self._ended = False
        self._kept = 0  # places from which text is kept for `rewind`
        self._kept_at_end = 0  # of them kept when the text ended
        self._before: list[str] = []  # pieces of text before `_data`, while some is kept
        self._base = 0  # the place of `_data` in the whole text

    def add(self, text: str) -> None:
        """More text has arrived. Read text is not copied again, however much is kept."""
        at = self._at
        if self._kept and at:
            self._before.append(self._data[:at])
        self._data, self._at = self._data[at:] + text, 0
        self._base += at

    def end(self) -> None:
        """No more text will arrive."""
        self._ended, self._kept_at_end = True, self._kept

    @property
    def ended(self) -> bool:
        """True if no text is unread and none will arrive."""
        return self._ended and self._at == len(self._data)

    def keep(self) -> int:
        """Keeps the text from here on. Returns the place, for one call of `rewind` or `release`."""
        self._kept += 1
        return self._base + self._at

    def rewind(self, place: int) -> bool:
        """Goes back to a place of `keep`: the text from there on is unread again.

        True if the text has ended while it was read from there on: with more text it might have been read.
        """
        if place >= self._base:
            self._at = place - self._base
        else:
            before = "".join(self._before)
            cut = place - (self._base - len(before))
            self._before = [before[:cut]]
            self._data, self._at, self._base = before[cut:] + self._data, 0, place
        is_cut = self._kept == self._kept_at_end > 0
        self.release()
        return is_cut

    def release(self) -> None:
        """Ends `keep`: text that was read since stays read."""
        self._kept -= 1
        self._kept_at_end = min(self._kept_at_end, self._kept)
        if not self._kept:
            self._before.clear()

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters, or fewer at the end of the text. They stay unread."""
        while len(self._data) - self._at < count and not self._ended:
            yield None
        return self._data[self._at : self._at + count]

    def unread(self, limit: int) -> str:
        """The unread text that has arrived, at most `limit` characters. It stays unread."""
        return self._data[self._at : self._at + limit]

    def skip(self, count: int) -> None:
        """Reads `count` characters that `peek` has shown."""
        self._at += count

    def back(self, count: int) -> None:
        """The last `count` characters that were read are unread again."""
        self._at -= count

    def literal(self, text: str) -> Reading[bool]:
        """Reads `text`. False, with nothing read, if something else follows."""
        while True:
            if self._data.startswith(text, self._at):
                self._at += len(text)
                return True
            if self._ended or not text.startswith(self._data[self._at : self._at + len(text)]):
                return False
            yield None

    def next_marker(self, markers: Markers) -> Reading[str]:
        """The marker that follows, which stays unread. Empty if none does."""
        while True:
            waits = not self._ended and markers.possible_start(self._data, self._at) == self._at < len(self._data)
            if not waits and (self._ended or self._at < len(self._data)):
                found = markers.find(self._data[self._at : self._at + markers.longest])
                return found[1] if found is not None and found[0] == 0 else ""
            yield None

    def one_of(self, markers: Markers) -> Reading[str]:
        """Reads the marker that follows. Empty, with nothing read, if none does."""
        found = yield from self.next_marker(markers)
        self._at += len(found)
        return found

    def spaces(self) -> Reading[None]:
        """Reads whitespace, if any follows."""
        while True:
            data, at = self._data, self._at
            while at < len(data) and data[at] in SPACES:
                at += 1
            self._at = at
            if at < len(data) or self._ended:
                return
            yield None

    def spaced_literal(self, text: str) -> Reading[bool]:
        """Reads whitespace, if any follows, and `text`. False, with nothing read, if something else follows."""
        place = self.keep()
        yield from self.spaces()
        if (yield from self.literal(text)):
            self.release()
            return True
        self.rewind(place)
        return False

    def until(self, kind: PartKind, markers: Markers, encode: Callable[[str], str] | None = None) -> Reading[str]:
        """Yields the text before the next marker as parts of this kind, and reads the marker.

        Returns the marker; empty at the end of the text. No more text waits than may be the beginning of a marker.
        `encode` turns each piece into the text of its part.
        """
        while True:
            if markers.is_far(self._data, self._at):
                found, certain = None, len(self._data)
            else:
                found = markers.find(self._data, self._at)
                # another marker may begin at the same place and be longer
                if found is not None and (self._ended or markers.possible_start(self._data, found[0]) > found[0]):
                    if found[0] > self._at:
                        yield self._taken(kind, found[0], encode)
                    self._at += len(found[1])
                    return found[1]
                certain = len(self._data) if self._ended else markers.possible_start(self._data, self._at)
                if found is not None:
                    certain = min(found[0], certain)
            if certain > self._at:
                yield self._taken(kind, certain, encode)
            if self._ended:
                return ""
            yield None

    def past(self, markers: Markers) -> Reading[str]:
        """Reads the text up to and with the next marker as syntax. Returns the marker; empty at the end of the text."""
        return (yield from silent(self.until(PartKind.CONTENT, markers)))

    def before(self, markers: Markers, limit: int, fits: Callable[[str], bool] = _any) -> Reading[str | None]:
        """Reads the text before the next marker, which stays unread.

        None, with nothing read, if more than `limit` characters come before it, or the text ends without one, or its
        beginning does not fit: no more text waits than may come before a marker.
        """
        while True:
            found = markers.find(self._data, self._at)
            if fits is not _any:
                end = markers.possible_start(self._data, self._at) if found is None else found[0]
                if not fits(self._data[self._at : end]):
                    return None
            if found is not None:
                if found[0] - self._at > limit:
                    return None
                text, self._at = self._data[self._at : found[0]], found[0]
                return text
            if self._ended or len(self._data) - self._at > limit + markers.longest:
                return None
            yield None

    def rest(self, kind: PartKind) -> Reading[None]:
        """Yields all text to the end as parts of this kind."""
        while not self.ended:
            if len(self._data) > self._at:
                yield self._taken(kind, len(self._data))
            if not self._ended:
                yield None

    def drop_rest(self) -> Reading[None]:
        """Reads all text to the end as syntax."""
        while not self.ended:
            self._at = len(self._data)
            if not self._ended:
                yield None

    def emit(self, kind: PartKind, count: int) -> Reading[None]:
        """Yields the next `count` characters, which `peek` has shown, as a part of this kind."""
        if count:
            yield self._taken(kind, self._at + count)

    def _taken(self, kind: PartKind, end: int, encode: Callable[[str], str] | None = None) -> Part:
        text, self._at = self._data[self._at : end], end
        return Part(kind, text if encode is None else encode(text))
