"""How long the texts are that a regular expression matches: contradictions with other bounds are found by it."""

from dataclasses import dataclass

UNBOUNDED = float("inf")
MAX_DEPTH = 50  # of groups in groups
_REPEATS: dict[str, tuple[float, float]] = {"*": (0, UNBOUNDED), "+": (1, UNBOUNDED), "?": (0, 1)}
_ANCHORS = ("^", "$", "\\b", "\\B")
_AROUND = ("?=", "?!", "?<=", "?<!")
_ESCAPE_CHARS = {"x": 4, "u": 6}  # with the backslash; others have two


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Characters of the shortest and of the longest text."""

    least: float
    most: float


ANY_LENGTH = LengthRange(0, UNBOUNDED)
_NOTHING = LengthRange(0, 0)


def regex_lengths(pattern: str) -> LengthRange:
    """The bounds for texts that the whole of this expression matches. There are none if it cannot be read."""
    scanner = _Scanner(pattern)
    try:
        found = scanner.choice(0)
    except (IndexError, ValueError):  # it ends in the middle of something
        return ANY_LENGTH
    return found if scanner.at == len(pattern) else ANY_LENGTH


class _Scanner:
    """Reads an expression from its beginning to its end. Raises IndexError or ValueError for any other text."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self.at = pattern, 0

    def choice(self, depth: int) -> LengthRange:
        """Branches, up to the end of their group."""
        found = self._branch(depth)
        while self._pattern.startswith("|", self.at):
            self.at += 1
            other = self._branch(depth)
            found = LengthRange(min(found.least, other.least), max(found.most, other.most))
        return found

    def _branch(self, depth: int) -> LengthRange:
        least = most = 0.0
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            one = self._group(depth) if self._pattern[self.at] == "(" else self._atom()
            times = self._repeat()
            least += one.least * times[0]
            most += one.most * times[1] if one.most else 0
        return LengthRange(least, most)

    def _group(self, depth: int) -> LengthRange:
        if depth == MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} groups in groups")
        self.at += 1
        is_around = self._pattern.startswith(_AROUND, self.at)
        if self._pattern.startswith(("?<=", "?<!"), self.at):
            self.at += 3
        elif is_around:
            self.at += 2
        elif self._pattern.startswith(("?<", "?P<"), self.at):
            self.at = self._pattern.index(">", self.at) + 1
        elif self._pattern.startswith("?", self.at):  # flags
            self.at = self._pattern.index(":", self.at) + 1
        inner = self.choice(depth + 1)
        if self._pattern[self.at] != ")":
            raise ValueError("a group does not end")
        self.at += 1
        return _NOTHING if is_around else inner

    def _atom(self) -> LengthRange:
        begin, char = self.at, self._pattern[self.at]
        if char == "\\":
            kind = self._pattern[self.at + 1]
            self.at = (
                self._pattern.index("}", self.at) + 1
                if self._pattern.startswith(("p{", "P{", "x{", "u{"), self.at + 1)
                else self.at + _ESCAPE_CHARS.get(kind, 2)
            )
        elif char == "[":
            self._pass_set()
        else:
            self.at += 1
        return _NOTHING if self._pattern[begin : self.at] in _ANCHORS else LengthRange(1, 1)

    def _pass_set(self) -> None:
        self.at += 2 if self._pattern.startswith("[^", self.at) else 1
        first = self.at
        while self._pattern[self.at] != "]" or self.at == first:
            self.at += 2 if self._pattern[self.at] == "\\" else 1
        self.at += 1

    def _repeat(self) -> tuple[float, float]:
        """How often the last part may come."""
        char = self._pattern[self.at : self.at + 1]
        if char in _REPEATS:
            self.at += 1
            times = _REPEATS[char]
        elif char == "{" and self._pattern[self.at + 1 : self.at + 2].isdigit():
            end = self._pattern.index("}", self.at)
            least, comma, most = self._pattern[self.at + 1 : end].partition(",")
            times = int(least), int(most) if most else UNBOUNDED if comma else int(least)
            self.at = end + 1
        else:
            return 1, 1
        if self._pattern[self.at : self.at + 1] == "?":  # lazy
            self.at += 1
        return times
