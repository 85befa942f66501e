"""Reads calls of Gemma models: call:get_weather{city:<|"|>Paris<|"|>,days:3}, with markers around.

Keys have no quotes, and a marker is the quote of strings, which have no escapes. Objects, lists and words are those of
JSON, and strings of JSON are read too: the grammar of forced calls writes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.shared.output_parsing.json_text import escaped, json_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import ALPHANUMERIC
from blockyard.shared.tool_parsers.nested_values import Notation, ValueReader, json_number
from blockyard.shared.tool_parsers.tools import Tool

MAX_NAME_CHARS = 128
_HEAD = "call:"
_NAME_CHARS = frozenset(ALPHANUMERIC + "_-.:")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_BEHIND_NAME = Markers("{")


@dataclass(frozen=True, slots=True)
class BraceCalls:
    """The markers of one family."""

    start: str
    end: str
    quote: str

    def read(self, text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
        """Reads an answer: see `ToolFormat`."""
        starts = Markers(self.start)
        values = ValueReader(Notation({"{": "}", "[": "]"}, self._read_string, json_of_word, (self.end,)), "}")
        while found := (yield from text.until(PartKind.CONTENT, starts)):
            place = text.keep()
            yield from text.spaces()
            name = (yield from self._name(text)) if (yield from text.literal(_HEAD)) else ""
            if not name:
                text.rewind(place)
                yield Part(PartKind.CONTENT, found)
                continue
            text.release()
            yield Part(PartKind.CALL, name)
            yield from values.read(text, "")
            yield CALL_END
            if (yield from text.spaced_literal(self.end)):
                yield from text.spaces()

    def write_grammar(self, rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
        calls = [f"{rules.text(_HEAD + tool.name)} {rules.arguments(tool)}" for tool in tools]
        return rules.repeated(f"{rules.marker(self.start)} {any_of(calls)} {rules.marker(self.end)}", parallel)

    def _name(self, text: TextInput) -> Reading[str]:
        """Reads the name up to the brace behind it, which stays unread. Empty if something else follows."""
        return ((yield from text.before(_BEHIND_NAME, MAX_NAME_CHARS, _may_be_name)) or "").strip()

    def _read_string(self, text: TextInput, behind: str) -> Reading[bool | None]:
        """Writes the string that follows: see `Notation`."""
        if (yield from text.peek()) == '"':
            return (yield from json_value(text, PartKind.ARGUMENTS))
        if not (yield from text.literal(self.quote)):
            return None
        yield Part(PartKind.ARGUMENTS, '"')
        if not (yield from text.until(PartKind.ARGUMENTS, Markers(self.quote), escaped)):
            return False
        yield Part(PartKind.ARGUMENTS, '"')
        return True


def _may_be_name(text: str) -> bool:
    return _NAME_CHARS.issuperset(text.strip())


def json_of_word(word: str) -> str | None:
    return _WORDS.get(word) or json_number(word)
