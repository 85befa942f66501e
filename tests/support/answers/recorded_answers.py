"""Answers of model families with the parts they have, and checks that every format of answers has to pass."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind
from blockyard.shared.output_parsing.reader import Format, OutputReader, append, read_all
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

WORD = re.compile(r"q[0-9a-f]{4}q")  # words that mutations insert: each must appear in the parts
LATE_ID = re.compile(r'"id"\s*:\s*"[^"]*"')  # ids of calls are read, and may come too late to be used
PLACES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NESTED = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "filter": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
        "exact": {"type": "boolean"},
        "score": {"type": "number"},
    },
}
TOOLS = (
    Tool(ToolKind.FUNCTION, "get_weather", PLACES),
    Tool(ToolKind.FUNCTION, "search", NESTED),
    Tool(ToolKind.FUNCTION, "get_time", {"type": "object", "properties": {}}),
)


@dataclass(frozen=True)
class Answer:
    name: str
    text: str
    parts: tuple[Part, ...]


def content(text: str) -> tuple[Part, ...]:
    return (Part(PartKind.CONTENT, text),)


def reasoning(text: str) -> tuple[Part, ...]:
    return (Part(PartKind.REASONING, text),)


def call(name: str, arguments: str, call_id: str = "") -> tuple[Part, ...]:
    begin = Part(PartKind.CALL, name, call_id)
    return (begin, Part(PartKind.ARGUMENTS, arguments), CALL_END) if arguments else (begin, CALL_END)


def tool_reader(tool_format: ToolFormat, tools: Sequence[Tool] = TOOLS) -> Format:
    return lambda text: tool_format.read(text, tools)


def joined(read: Format, pieces: Sequence[str]) -> list[Part]:
    """The parts of text that arrives in these pieces."""
    reader, parts = OutputReader(read), list[Part]()
    for piece in pieces:
        for part in reader.push(piece):
            append(parts, part)
    for part in reader.finish():
        append(parts, part)
    return parts


def format_tests(
    read: Format, answers: Sequence[Answer], markers: Sequence[str], plain: str, longest: int
) -> tuple[Callable[[Answer], None], Callable[[], None], Callable[[], None]]:
    """Three tests that a module of a format names: its answers have their parts, damaged ones lose no word, and of
    `plain` content no more is held back than the `longest` marker has characters."""

    @pytest.mark.parametrize("answer", answers, ids=lambda a: a.name)
    def have_their_parts(answer: Answer) -> None:
        check_answer(read, answer)

    def damaged() -> None:
        check_mutations(read, answers, 500, markers)

    def held_back() -> None:
        check_held_back(read, plain, longest)

    return have_their_parts, damaged, held_back


def check_answer(read: Format, answer: Answer) -> None:
    """The parts are those recorded, at every split in two, for single characters, and for random pieces."""
    text, expected = answer.text, list(answer.parts)
    assert read_all(read, text) == expected
    for at in range(1, len(text)):
        assert joined(read, [text[:at], text[at:]]) == expected, f"split at {at}: {text[:at]!r}"
    assert joined(read, list(text)) == expected
    draw = random.Random(text)
    for _ in range(50):
        assert joined(read, pieces_of(text, draw)) == expected


def pieces_of(text: str, draw: random.Random) -> list[str]:
    """Cuts the text as tokens might: one to nine characters each."""
    pieces, at = [], 0
    while at < len(text):
        size = draw.randint(1, 9)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def check_mutations(read: Format, answers: Sequence[Answer], count: int, markers: Sequence[str] = ()) -> None:
    """Damaged answers raise nothing, lose no word, and have the same parts whole and in pieces."""
    draw = random.Random(len(answers))
    for text in mutations([answer.text for answer in answers], count, markers, draw):
        parts = read_all(read, text)
        assert joined(read, pieces_of(text, draw)) == parts, text
        shown = "".join(part.text + part.call_id for part in parts)
        lost = {word for word in WORD.findall(LATE_ID.sub("", text)) if word not in shown}
        assert not lost, f"{lost} of {text!r}: {parts}"


def mutations(texts: Sequence[str], count: int, markers: Sequence[str], draw: random.Random) -> Iterator[str]:
    for _ in range(count):
        text = draw.choice(texts)
        for _ in range(draw.randint(1, 4)):
            text = _mutated(text, markers, draw)
        yield text


def _mutated(text: str, markers: Sequence[str], draw: random.Random) -> str:
    at, end = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
    word = f" q{draw.randrange(1 << 16):04x}q "
    match draw.randrange(7):
        case 0:
            return text[:at] + word + text[at:]
        case 1:  # a word in the place of one character
            return text[:at] + word.strip() + text[at + 1 :]
        case 2:
            return text[:at] + text[min(end, at + draw.randint(1, 12)) :]
        case 3:
            return text[:end] + text[at:]
        case 4:
            return text[:at]
        case 5:
            return text[:at] + draw.choice([*markers, "{", "}", '"', "\\", "[", "]", "<", ">", ":", ","]) + text[at:]
        case _:
            return text[:at] + draw.choice("ab\"'\\{}[]<>|=:,/ \n\u00e9\u4e2d\U0001f600") + text[at + 1 :]


def check_held_back(read: Format, plain: str, longest: int) -> None:
    """Plain content: no more of it is held back than the longest marker has characters."""
    reader, shown = OutputReader(read), 0
    for i, char in enumerate(plain):
        shown += sum(len(part.text) for part in reader.push(char))
        assert i + 1 - shown < longest, plain[shown : i + 1]
