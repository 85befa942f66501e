"""Stop strings in a stream: text that may be the beginning of one is held back."""


class StopFinder:
    """Cuts the text at the stop string that is complete first; of two that end together, at the longer one.

    That depends on the characters alone, not on how they arrive.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: list[str], include: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, check: bool = True) -> str:
        """Text that can be shown. Without `check` (before min_tokens) no stop string may end in `text`."""
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
        """The end: what was held back is no stop string."""
        text, self._held = self._held, ""
        return text

    def _first(self, data: str, known: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the first that is complete, ending after the `known` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = data.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _possible_start(self, data: str) -> int:
        """Where the longest end of `data` begins that a stop string begins with."""
        for start in range(max(0, len(data) - self._longest + 1), len(data)):
            tail = data[start:]
            if any(stop.startswith(tail) and len(stop) > len(tail) for stop in self._stops):
                return start
        return len(data)
