"""A tool that an answer may call."""

import enum
from typing import Any

import msgspec

CUSTOM_INPUT = "input"  # the argument that holds the text of a call to a custom tool


class ToolKind(enum.StrEnum):
    FUNCTION = "function"
    CUSTOM = "custom"  # its argument is one text


class TextSyntax(enum.StrEnum):
    """The language of a custom tool's grammar."""

    LARK = "lark"
    REGEX = "regex"


class TextGrammar(msgspec.Struct, frozen=True):
    """The grammar of a custom tool's text."""

    syntax: TextSyntax
    definition: str


class Tool(msgspec.Struct, frozen=True):
    kind: ToolKind
    name: str
    parameters: dict[str, Any]  # a JSON schema of the arguments
    strict: bool = False
    grammar: TextGrammar | None = None  # of a custom tool
