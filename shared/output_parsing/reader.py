"""Runs the formats of one choice over its text."""

from collections.abc import Callable

from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput

Format = Callable[[TextInput], Reading[None]]
CUTS = (PartKind.CALL, PartKind.CALL_END)  # parts that are never joined with the one before


class OutputReader:
    """Turns the text of one choice into parts. Whatever the pieces of text are, the joined parts are the same."""

    __slots__ = ("_input", "_reading")

    def __init__(self, read: Format) -> None:
        self._input = TextInput()
        self._reading = read(self._input)

    def push(self, text: str) -> list[Part]:
        """The parts that this text makes certain. Raises what a format raises."""
        self._input.add(text)
        return self._advance()

    def finish(self) -> list[Part]:
        """The rest of the parts, at the end of the text."""
        self._input.end()
        return self._advance()

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._reading:
            if part is None:
                break
            if parts:
                append(parts, part)
            else:
                parts.append(part)
        return parts


def read_all(read: Format, text: str) -> list[Part]:
    """The parts of a whole answer."""
    reader = OutputReader(read)
    parts = reader.push(text)
    for part in reader.finish():
        append(parts, part)
    return parts


def append(parts: list[Part], part: Part) -> None:
    """Adds the part, joined with the last one if they belong together."""
    if parts and parts[-1].kind == part.kind and part.kind not in CUTS:
        parts[-1] = Part(part.kind, parts[-1].text + part.text)
    else:
        parts.append(part)
