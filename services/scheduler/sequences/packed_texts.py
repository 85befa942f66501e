"""The texts of a request to a model without KV. They wait, run and return in slices: no step has a loop over texts."""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

from blockyard.shared.messages import Pool
from blockyard.shared.token_ids import ID_BYTES


class TextColumns:
    __slots__ = ("ends", "frame", "indexes", "lengths")

    def __init__(self, frame: Pool) -> None:
        self.frame = frame
        self.indexes, self.lengths = array("I", frame.indexes), array("I", frame.lengths)
        self.ends = [0, *accumulate(self.lengths)]  # [i]: tokens of the first i texts


@dataclass(frozen=True, slots=True)
class TextSlice:
    """Neighbouring texts of a frame."""

    columns: TextColumns
    first: int
    end: int

    @property
    def num_texts(self) -> int:
        return self.end - self.first

    @property
    def num_tokens(self) -> int:
        return self.columns.ends[self.end] - self.columns.ends[self.first]

    @property
    def indexes(self) -> "array[int]":
        return self.columns.indexes[self.first : self.end]

    @property
    def token_ids(self) -> bytes:
        ends = self.columns.ends
        return self.columns.frame.token_ids[ID_BYTES * ends[self.first] : ID_BYTES * ends[self.end]]

    @property
    def lengths(self) -> bytes:
        return self.columns.frame.lengths[ID_BYTES * self.first : ID_BYTES * self.end]

    @property
    def second_starts(self) -> bytes:
        return self.columns.frame.second_starts[ID_BYTES * self.first : ID_BYTES * self.end]

    def num_within(self, num_tokens: int) -> int:
        """The number of leading texts that have so many tokens at most."""
        ends = self.columns.ends
        return bisect_right(ends, ends[self.first] + num_tokens, self.first + 1, self.end + 1) - 1 - self.first

    def split(self, count: int) -> "tuple[TextSlice, TextSlice | None]":
        """The first `count` texts, and the others, if there are any."""
        middle = self.first + count
        rest = TextSlice(self.columns, middle, self.end) if middle < self.end else None
        return TextSlice(self.columns, self.first, middle), rest

    def without(self, indexes: Collection[int]) -> "list[TextSlice]":
        """The slices that are left of this one without some of its texts."""
        if not indexes:
            return [self]
        kept: list[TextSlice] = []
        first = self.first
        for place, index in enumerate(self.indexes, self.first):
            if index in indexes:
                kept.append(TextSlice(self.columns, first, place))
                first = place + 1
        return [one for one in (*kept, TextSlice(self.columns, first, self.end)) if one.first < one.end]


class PackedTexts:
    """The texts of a request that wait or are in a step. Each is in one slice."""

    def __init__(self, frame: Pool) -> None:
        self.in_flight: list[TextSlice] = []
        self.set_frame(frame)

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self.in_flight

    def set_frame(self, frame: Pool) -> None:
        """These texts are wanted. Texts in a step go on, all others wait."""
        self.frame, columns = frame, TextColumns(frame)
        running = {index for one in self.in_flight for index in one.indexes}
        self._waiting = deque(TextSlice(columns, 0, len(columns.indexes)).without(running))
        self.num_texts = sum(one.num_texts for one in self._waiting)  # that wait ...
        self.num_tokens = sum(one.num_tokens for one in self._waiting)  # ... and their tokens

    def take(self, most: int, room: int | None = None) -> TextSlice | None:
        """Takes the next texts for a step: up to `most` tokens, or a single text of up to `room` tokens.

        room: None takes a text of any length. Returns None if the next text has more.
        """
        first = self._waiting.popleft()
        count = first.num_within(most)
        if not count and (room is None or first.num_within(room)):
            count = 1
        taken, rest = first.split(count) if count else (None, first)
        if rest is not None:
            self._waiting.appendleft(rest)
        if taken is not None:
            self.in_flight.append(taken)
            self.num_texts -= taken.num_texts
            self.num_tokens -= taken.num_tokens
        return taken

    def finish(self, texts: TextSlice) -> None:
        """The step of these texts is over."""
        self.in_flight.remove(texts)

    def put_back(self, texts: TextSlice) -> None:
        """The step of these texts is lost: they wait again, before the others."""
        self.in_flight.remove(texts)
        self._waiting.appendleft(texts)
        self.num_texts += texts.num_texts
        self.num_tokens += texts.num_tokens
