"""Writes the grammar of forced calls: Lark as llguidance reads it, with JSON schemas inside."""

from collections.abc import Sequence
from typing import Any

import msgspec

from blockyard.shared.tool_parsers.lark_regex import lark_regex
from blockyard.shared.tool_parsers.tools import CUSTOM_INPUT, TextSyntax, Tool, ToolKind

MAX_CALLS = 32  # in one answer; without a bound some models never end
_REGEX_SIGNS = r"\.+*?()|[]{}^$#&-~"


class GrammarRules:
    """The rules of one grammar. Methods return what stands for a rule in expressions of other rules."""

    def __init__(self, only_texts: bool = False) -> None:
        """`only_texts`: no more than the texts of custom tools is limited, and functions take any object."""
        self._only_texts = only_texts
        self.has_texts = False  # some text of a custom tool is limited
        self.markers: list[str] = []  # the texts of marker_0, marker_1, ...: `Grammar.markers`
        self._names: dict[tuple[str, str], str] = {}  # of rules, by kind and body

    def marker(self, text: str) -> str:
        """A marker of the format: one special token where the vocabulary has one for it, and else its text."""
        if text not in self.markers:
            self.markers.append(text)
        return f"marker_{self.markers.index(text)}"

    def text(self, text: str) -> str:
        """Exactly this text."""
        return msgspec.json.encode(text).decode()

    def json(self, schema: Any) -> str:
        """A JSON value that is valid by this schema."""
        return self.rule(f"%json {msgspec.json.encode(schema).decode()}")

    def regex(self, pattern: str) -> str:
        """Text that the whole of this regular expression matches, without look-around."""
        return self.terminal(f"/{pattern.replace('/', chr(92) + '/')}/")

    def terminal(self, body: str) -> str:
        """Text that the whole of `body` matches: regular expressions, strings, other terminals, `&`, `|` and `~`."""
        return self._named("TEXT", body)

    def until(self, term: str, end: str, special: str = "") -> str:
        """Text of the terminal `term` up to the first `end`, in which `special` may be a special token.

        A terminal is read as far as it goes, and `end` may begin like more of the text, so both are one terminal. With
        a token in `end` a terminal goes up to there. Which of the two holds is known where the grammar is compiled:
        both are allowed.
        """
        free = self.terminal(f"{term} & ~(/(?s:.*)/ {self.text(end.lstrip())} /(?s:.*)/)")
        written = self.terminal(f"{free} {self.text(end)}")
        if not special or special not in end:
            return written
        before, _, rest = end.partition(special)
        head = self.terminal(f"{free} {self.text(before)}") if before else free
        return f"({written} | {head} {self.marker(special)} {self.text(rest) if rest else ''})"

    def rule(self, body: str) -> str:
        return self._named("rule", body)

    def arguments(self, tool: Tool) -> str:
        """The JSON object of a call's arguments."""
        if self._only_texts and text_pattern(tool) is None:
            return self.json({"type": "object"})
        self.has_texts |= text_pattern(tool) is not None
        return self.json(arguments_schema(tool))

    def repeated(self, call: str, parallel: bool, separator: str = "") -> str:
        """One call, or up to `MAX_CALLS` with an expression between each two."""
        if not parallel:
            return call
        one = self.rule(call)
        return f"{one} ({separator} {one}){{0,{MAX_CALLS - 1}}}"

    def text_without(self, openings: Sequence[str]) -> str:
        """Text, also none, in which none of `openings` is complete; one of them may follow it.

        What follows begins with a quoted text or a marker that has all of the opening, because the lexer does not go
        back from an opening to an earlier end of a text.
        It cannot end, nor an opening begin, behind all of an opening but its last character. Raises ValueError for
        openings with the first character of one at another place: the lexer would miss it.
        """
        firsts = "".join(sorted({text[0] for text in openings}))
        if any(char in firsts for text in openings for char in text[1:]):
            raise ValueError(f"openings {list(openings)} have the first character of one at another place")
        pieces = [self.regex(f"[^{_in_class(firsts)}]+")]
        parts = [_unfinished(text, firsts) for text in openings if len(text) > 1]
        if parts:
            pieces.append(self.regex("|".join(parts)))
        return f"{self.rule(any_of(pieces))}*"

    def source(self, start: str) -> str:
        """The whole grammar, except for the rules of its markers."""
        rules = [f"{name}: {body}" for (_, body), name in self._names.items()]
        return "\n".join([f"start: {start}", *rules]) + "\n"

    def _named(self, kind: str, body: str) -> str:
        return self._names.setdefault((kind, body), f"{kind}_{len(self._names)}")


def _unfinished(opening: str, firsts: str) -> str:
    """A regular expression of each beginning of `opening` that lacks two characters, or the last one beside another."""
    pattern = f"{_in_class(opening[-2])}[^{_in_class(firsts + opening[-1])}]"
    if len(opening) == 2:
        return pattern
    for char in reversed(opening[:-2]):
        pattern = f"{_in_class(char)}(?:{pattern})?"
    return pattern


def _in_class(chars: str) -> str:
    """The characters in a regular expression, alone or in a class."""
    return "".join(f"\\{char}" if char in _REGEX_SIGNS else char for char in chars).replace("\n", "\\n")


def any_of(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a call's arguments. A custom tool's text is one argument, which `text_pattern` limits."""
    pattern = text_pattern(tool)
    if pattern is None:
        return {"type": "object", **tool.parameters}
    return {**tool.parameters, "properties": {CUSTOM_INPUT: {"type": "string", "pattern": f"^(?:{pattern})$"}}}


def text_pattern(tool: Tool) -> str | None:
    """The regular expression of a custom tool's text; None for any text, and for a grammar that is none."""
    if tool.kind == ToolKind.FUNCTION or tool.grammar is None:
        return None
    definition = tool.grammar.definition
    return definition if tool.grammar.syntax == TextSyntax.REGEX else lark_regex(definition)
