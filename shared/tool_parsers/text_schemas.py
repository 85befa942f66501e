"""Writes what a JSON schema says of a string as a terminal of llguidance's Lark, for strings that stand without quotes.

A terminal is a regular language there, with `&` (and), `|` (or) and `~` (not), as schemas put others together. The
parts of a schema that allow other values than strings are cut out of it as a schema of their own.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.grammars.format_patterns import FORMAT_PATTERNS, FORMATS
from blockyard.shared.tool_parsers.regex_lengths import LengthRange, regex_lengths
from blockyard.shared.tool_parsers.schema_types import listed, named_types, resolve, type_of

ANY_TEXT = "/(?s:.*)/"
MAX_SCHEMAS = 500  # looked at for one argument
NOT_ENFORCED = ("if", "then", "else", "contentSchema", "unevaluatedProperties")
_SETS = {"d": "0-9", "w": "A-Za-z0-9_"}  # in regular expressions of JSON schemas they are sets of ASCII


class TextSchemas:
    """The schemas inside of one tool's. Raises RequestError for keywords that cannot be enforced."""

    def __init__(self, root: dict[str, Any], tool: str) -> None:
        self._root, self._tool = root, tool
        self._left = MAX_SCHEMAS

    def terminal(self, schema: Any) -> str | None:
        """A terminal for the strings that are valid by this schema. None if there are none.

        Contradictions between lengths are found, but not between two patterns.
        """
        terms = self._terms(schema)
        return None if None in terms or not _may_overlap([one for one in terms if one is not None]) else both(terms)

    def _terms(self, schema: Any) -> list[str | None]:
        """Terminals that all have to match. None stands for no text."""
        self._count()
        if not isinstance(schema, dict):
            return [None] if schema is False else []
        for keyword in NOT_ENFORCED:
            if keyword in schema:
                raise self._refusal(keyword)
        terms = self._own(schema)
        for part in listed(schema, "allOf"):
            terms += self._terms(part)
        if "$ref" in schema:
            terms += self._terms(resolve(self._root, schema["$ref"]))
        if listed(schema, "anyOf"):
            terms.append(either(map(self.terminal, schema["anyOf"])))
        if listed(schema, "oneOf"):
            terms.append(_exactly_one([one for one in map(self.terminal, schema["oneOf"]) if one is not None]))
        if "not" in schema:
            terms.append(without(ANY_TEXT, self.terminal(schema["not"])))
        return terms

    def _own(self, schema: dict[str, Any]) -> list[str | None]:
        """Returns the terms of the keywords that hold no other schemas."""
        if "string" not in named_types(schema.get("type")):
            return [None]
        terms: list[str | None] = []
        if isinstance(schema.get("enum"), list):
            terms.append(either(quoted(value) for value in schema["enum"] if isinstance(value, str)))
        if "const" in schema:
            terms.append(quoted(schema["const"]) if isinstance(schema["const"], str) else None)
        if "minLength" in schema or "maxLength" in schema:
            most = int(schema["maxLength"]) if "maxLength" in schema else ""
            terms.append(f"/(?s:.{{{int(schema.get('minLength', 0))},{most}}})/")
        if isinstance(schema.get("pattern"), str):
            terms.append(search(schema["pattern"]))
        if schema.get("format") in FORMATS:  # others annotate
            if schema["format"] not in FORMAT_PATTERNS:
                raise self._refusal(f"format {schema['format'][:40]}")
            terms.append(f"/{FORMAT_PATTERNS[schema['format']].replace('/', chr(92) + '/')}/")
        return terms

    def restricted(self, schema: Any, types: frozenset[str]) -> Any:
        """The schema of the valid values of these types. None if there are none."""
        self._count()
        if not isinstance(schema, dict):
            return None if schema is False else {"type": sorted(types)}
        kept = dict(schema)
        if "enum" in schema or "const" in schema:
            values = listed(schema, "enum") if "enum" in schema else [schema["const"]]
            kept["enum"] = [value for value in values if type_of(value) in types]
            kept.pop("const", None)
            if not kept["enum"]:
                return None
        names = named_types(schema.get("type")) & types
        if not names:
            return None
        kept["type"] = sorted(names - {"integer"} if "number" in names else names)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if listed(schema, keyword):
                parts = [self.restricted(part, types) for part in schema[keyword]]
                kept[keyword] = [part for part in parts if part is not None]
                if not kept[keyword] or (keyword == "allOf" and None in parts):
                    return None
        if "$ref" in schema:
            target = self.restricted(resolve(self._root, kept.pop("$ref")), types)
            if target is None:
                return None
            kept["allOf"] = [*listed(kept, "allOf"), target]
        return kept

    def allows(self, schema: Any, value: bool | None) -> bool:
        """Whether the schema allows this value, which is no string."""
        self._count()
        if not isinstance(schema, dict):
            return schema is not False
        if type_of(value) not in named_types(schema.get("type")):
            return False
        if isinstance(schema.get("enum"), list) and not any(one is value for one in schema["enum"]):
            return False
        if "const" in schema and schema["const"] is not value:
            return False
        if "$ref" in schema and not self.allows(resolve(self._root, schema["$ref"]), value):
            return False
        fitting = {
            key: [self.allows(part, value) for part in listed(schema, key)] for key in ("allOf", "anyOf", "oneOf")
        }
        if not all(fitting["allOf"]) or (fitting["oneOf"] and sum(fitting["oneOf"]) != 1):
            return False
        if fitting["anyOf"] and not any(fitting["anyOf"]):
            return False
        return "not" not in schema or not self.allows(schema["not"], value)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise RequestError(f"the schema of an argument of {self._tool} has more than {MAX_SCHEMAS} parts", "tools")

    def _refusal(self, what: str) -> RequestError:
        return RequestError(f"the arguments of {self._tool}: {what} cannot be enforced in this model's format", "tools")


def _may_overlap(terms: list[str]) -> bool:
    """False if no text is long and short enough for all of these terms."""
    lengths = [found for term in terms if (found := _lengths(term)) is not None]
    return max((one.least for one in lengths), default=0) <= min((one.most for one in lengths), default=0)


def _lengths(term: str) -> LengthRange | None:
    """Returns the lengths of a single text or regular expression. None for others."""
    if term.startswith("/"):
        return regex_lengths(term[1:-1])
    if term.startswith('"'):
        num_chars = len(msgspec.json.decode(term))
        return LengthRange(num_chars, num_chars)
    return None


def quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def both(terms: Iterable[str | None]) -> str | None:
    """Text that all terms match; any text without terms."""
    asserting = []
    for term in terms:
        if term is None:
            return None
        if term != ANY_TEXT:
            asserting.append(term)
    return ANY_TEXT if not asserting else asserting[0] if len(asserting) == 1 else f"({' & '.join(asserting)})"


def either(terms: Iterable[str | None]) -> str | None:
    possible = [term for term in terms if term is not None]
    if not possible or ANY_TEXT in possible:
        return ANY_TEXT if possible else None
    return possible[0] if len(possible) == 1 else f"({' | '.join(possible)})"


def without(term: str, other: str | None) -> str | None:
    """Text that `term` matches and `other` does not."""
    if other is None:
        return term
    return None if other == ANY_TEXT else f"({term} & ~{other})"


def _exactly_one(terms: list[str]) -> str | None:
    return either(without(term, either(terms[:i] + terms[i + 1 :])) for i, term in enumerate(terms))


def search(pattern: str) -> str:
    """Text in which the regular expression finds something, as `pattern` of JSON schemas means it.

    Anchors are understood at the ends of the pattern and of its top branches. A branch with others has to match the
    whole text, which is less than it may.
    """
    return f"/{'|'.join(map(_branch_source, _branches(pattern)))}/"


def _branches(pattern: str) -> list[list[str]]:
    """The pieces of the branches between which a pattern chooses: escapes, sets and single characters."""
    branches, depth, at = [list[str]()], 0, 0
    while at < len(pattern):
        end = _piece_end(pattern, at)
        piece, at = pattern[at:end], end
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(_translated(piece))
    return branches


def _piece_end(pattern: str, at: int) -> int:
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] != "[":
        return at + 1
    end = at + 1 + pattern.startswith("^", at + 1)
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1


def _translated(piece: str) -> str:
    if piece[0] == "[":
        for name, members in _SETS.items():
            piece = piece.replace(f"\\{name}", members)
    elif piece[0] == "\\" and piece[1:] in _SETS:
        piece = f"[{_SETS[piece[1:]]}]"
    if piece[0] != "\\":
        piece = piece.replace("/", "\\/")
    return piece.replace("\n", "\\n").replace("\r", "\\r")


def _branch_source(pieces: list[str]) -> str:
    starts, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = pieces[starts : len(pieces) - (ends and len(pieces) > starts)]
    if "^" in inner or "$" in inner:
        return f"(?:{''.join(inner)})"
    return f"{'' if starts else '(?s:.*)'}(?:{''.join(inner)}){'' if ends else '(?s:.*)'}"
