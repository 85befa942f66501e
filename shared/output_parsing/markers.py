"""Finds markers in text that arrives in pieces."""


class Markers:
    """Some texts, such as `</think>`, of which the first in a text is looked for.

    Of two that begin at the same place the longer one counts.
    """

    __slots__ = ("_firsts", "_longest", "_texts")

    def __init__(self, *texts: str) -> None:
        if not texts or not all(texts):
            raise ValueError(f"markers need texts, got {texts}")
        self._texts = tuple(sorted(set(texts), key=len, reverse=True))
        self._firsts = tuple({text[0] for text in texts})
        self._longest = len(self._texts[0])

    @property
    def longest(self) -> int:
        """Characters of the longest marker: more are never held back."""
        return self._longest

    def is_far(self, data: str, start: int) -> bool:
        """Whether no marker begins from `start` on, not even in part: that of nearly all pieces of text."""
        for char in self._firsts:  # noqa: SIM110  # a generator expression takes as long as all the rest
            if data.find(char, start) >= 0:
                return False
        return True

    def find(self, data: str, start: int = 0) -> tuple[int, str] | None:
        """The place of the first marker from `start` on, and the marker; None if there is none."""
        best, found = -1, ""
        for text in self._texts:
            at = data.find(text, start, len(data) if best < 0 else best + len(text))
            if at >= 0 and (best < 0 or at < best):
                best, found = at, text
        return None if best < 0 else (best, found)

    def possible_start(self, data: str, start: int = 0) -> int:
        """The first place from `start` on whose text, up to the end of `data`, may be the beginning of a marker."""
        first = max(start, len(data) - self._longest + 1)
        at = len(data)
        for char in self._firsts:
            place = data.find(char, first)
            while 0 <= place < at:
                if self._may_begin(data[place:]):
                    at = place
                    break
                place = data.find(char, place + 1)
        return at

    def may_start_with(self, char: str) -> bool:
        return char in self._firsts

    def _may_begin(self, tail: str) -> bool:
        return any(len(text) > len(tail) and text.startswith(tail) for text in self._texts)
