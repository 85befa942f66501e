"""One choice's stream: token ids to text, cut at stop strings."""

from collections.abc import Sequence
from typing import NamedTuple

from blockyard.services.detokenizer.repetition import RepetitionFinder
from blockyard.services.detokenizer.text_decoder import new_decoder
from blockyard.services.detokenizer.token_table import TokenTable, UnknownToken
from blockyard.shared.messages import StreamOpen
from blockyard.shared.token_ids import unpack


class StopFinder:
    """Cuts the text at the first complete stop string; of two that end together, at the longer one.

    Text that may be the beginning of a stop string is held back, so the result does not depend on how text arrives.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: list[str], include: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, check: bool = True) -> str:
        """Returns text to show. Without `check` (before min_tokens) stop strings that end in `text` are ignored."""
        if not text:
            return ""
        known = len(self._held)
        data = self._held + text
        if check and (match := self._first(data, known)) is not None:
            end, start, self.found = match
            self._held = ""
            return data[: end if self._include else start]
        keep = self._possible_start(data)
        self._held = data[keep:]
        return data[:keep]

    def flush(self) -> str:
        """Returns the held-back text at the end of the stream: it is not a stop string."""
        text, self._held = self._held, ""
        return text

    def _first(self, data: str, known: int) -> tuple[int, int, str] | None:
        """Returns (end, start, stop) of the first complete stop string that ends after the `known` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = data.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _possible_start(self, data: str) -> int:
        """Returns the start of the longest suffix of `data` that is the beginning of a stop string."""
        for start in range(max(0, len(data) - self._longest + 1), len(data)):
            tail = data[start:]
            if any(stop.startswith(tail) and len(stop) > len(tail) for stop in self._stops):
                return start
        return len(data)


class DecodedText(NamedTuple):
    """The text of some token ids. `used` of them are accounted for by `text`, now or later."""

    text: str
    used: int
    stop: str | None = None  # the stop string that ended the stream
    error: str = ""  # cause, if the id after the used ones is unknown
    repeats: bool = False  # the stream ended because its tokens repeat themselves


class Stream:
    """Decoder, stop strings and position of one choice. Fed by `take`, ended by `end`."""

    def __init__(self, scheduler: int, opened: StreamOpen, table: TokenTable) -> None:
        options = opened.options
        self.table = table
        self.request_id = opened.request_id
        self.attempt = opened.attempt
        self.choice = opened.choice
        self.gateway = opened.gateway
        self.scheduler = scheduler
        self.number = opened.stream  # the scheduler's number of it in TokenRows
        self.as_ids = options.tokens_as_ids
        self.shows_stop = options.include_stop
        self.count = 0  # output tokens so far
        self._has_gap = False
        self._decoder = new_decoder(
            table, options.skip_special_tokens, options.spaces_between_special_tokens, options.shown_special
        )
        self._stops = StopFinder(options.stop, options.include_stop) if options.stop else None
        self._repetition = None if options.repetition is None else RepetitionFinder(options.repetition)
        self._min_tokens = options.min_tokens
        self._uncut = opened.chars_sent  # characters that an earlier attempt delivered

    def replay(self, opened: StreamOpen) -> DecodedText:
        """Advances over the context, which is not shown, and over the output of earlier attempts."""
        try:
            for token_id in unpack(opened.context_ids):
                self._decoder.push(token_id)
        except UnknownToken as e:
            return DecodedText("", 0, error=str(e))
        return self.take(unpack(opened.output_ids))

    def take(self, token_ids: Sequence[int]) -> DecodedText:
        """Decodes output tokens in order. Ends early at a stop string, a repetition or an unknown id; the caller then
        calls `end`."""
        push, stops, repetition = self._decoder.push, self._stops, self._repetition
        text, used, repeats = "", 0, False
        try:
            if stops is None and repetition is None:
                for token_id in token_ids:
                    text += push(token_id)
                    used += 1
            else:
                for token_id in token_ids:
                    new = push(token_id)
                    used += 1
                    # as in vLLM, neither counts within the first min_tokens tokens
                    counts = self.count + used > self._min_tokens
                    text += new if stops is None else stops.push(new, counts)
                    if stops is not None and stops.found is not None:
                        break
                    repeats = repetition is not None and repetition.push(token_id) and counts
                    if repeats:
                        break
        except UnknownToken as e:
            self.count += used
            return DecodedText(self._cut(text), used, error=str(e))
        self.count += used
        return DecodedText(self._cut(text), used, None if stops is None else stops.found, repeats=repeats)

    def is_first_gap(self) -> bool:
        """Called when tokens are missing. Returns True the first time."""
        first, self._has_gap = not self._has_gap, True
        return first

    def end(self, hidden: int = 0) -> DecodedText:
        """Returns all held-back text, after `hidden` ids that are not shown. A stop string may end in it."""
        self.count += hidden
        if self._stops is None:
            return DecodedText(self._cut(self._decoder.flush()), hidden)
        if self._stops.found is not None:
            return DecodedText("", hidden, self._stops.found)
        text = self._stops.push(self._decoder.flush(), self.count > self._min_tokens)
        return DecodedText(self._cut(text + self._stops.flush()), hidden, self._stops.found)

    def _cut(self, text: str) -> str:
        if self._uncut:
            cut = min(self._uncut, len(text))
            self._uncut -= cut
            return text[cut:]
        return text
