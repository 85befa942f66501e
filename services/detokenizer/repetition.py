"""Finds output that repeats itself: some models write one phrase until they reach their limit of tokens."""

from blockyard.shared.messages import RepetitionDetection


class RepetitionFinder:
    """Sees the output tokens of one choice, in order, and keeps the last ones.

    A pattern repeats if the output ends with it `min_count` times in a row. Only numbers of tokens after which the
    last token comes again can be a pattern's size: they are found without a loop in Python.
    """

    __slots__ = ("_count", "_ids", "_largest", "_most", "_smallest")

    def __init__(self, asked: RepetitionDetection) -> None:
        self._smallest, self._largest = max(1, asked.min_pattern_size), asked.max_pattern_size
        self._count = max(2, asked.min_count)
        self._most = self._largest * self._count  # tokens that are looked at
        self._ids: list[int] = []

    def push(self, token_id: int) -> bool:
        """Returns True if the output repeats itself with this token."""
        ids = self._ids
        ids.append(token_id)
        if len(ids) > 2 * self._most:
            del ids[: -self._most]
        before = ids[-1 - self._largest : -1]
        before.reverse()  # the first is one token back
        size = self._smallest - 1
        while True:
            try:
                size = before.index(token_id, size) + 1
            except ValueError:
                return False
            if size * self._count > len(ids):
                return False
            if self._repeats(size):
                return True

    def _repeats(self, size: int) -> bool:
        end = self._ids[-size * self._count :]
        return end[size:] == end[:-size]
