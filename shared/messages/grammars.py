"""Structured output: what limits the tokens of a choice. Part of `Sampling`, and of `Tokenize`, which checks it."""

import enum

from blockyard.shared.messages.base import FrameStruct

MAX_GRAMMAR_BYTES = 256 << 10  # of a source, in UTF-8


class GrammarKind(enum.StrEnum):
    """The language of a grammar's source."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; the source is empty
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings: the output is one of them
    EBNF = "ebnf"  # GBNF, as llama.cpp and xgrammar read it
    LARK = "lark"
    STRUCTURAL_TAG = "structural_tag"  # JSON: free text with constrained parts between tags


class GrammarEngine(enum.StrEnum):
    """The library that makes the masks; the values of --guided-decoding-backend."""

    AUTO = "auto"
    GUIDANCE = "guidance"
    XGRAMMAR = "xgrammar"
    OUTLINES = "outlines"
    LM_FORMAT_ENFORCER = "lm-format-enforcer"


class Grammar(FrameStruct, frozen=True):
    """A grammar as its source. Compiled grammars are never sent: each process that needs masks compiles the source."""

    kind: GrammarKind
    source: str
    engine: GrammarEngine = GrammarEngine.AUTO  # the tokenizer replaces AUTO by the engine that takes the source
    whitespace_pattern: str = ""  # regex of the whitespace between JSON tokens; empty: the engine's own
    any_whitespace: bool = True  # False: JSON has no whitespace but what separates its tokens
    additional_properties: bool = True  # False: objects have no properties but those of the schema
    markers: list[str] = []  # of LARK: the texts of rules marker_0, marker_1, ..., each a special token where it is one


class OutputConstraint(FrameStruct, frozen=True):
    """The constraint on each token of a choice, from the first output token on.

    Without `begin_after` the grammar begins at once. With it, output is free until it ends with that marker, and the
    grammar begins behind the marker; with `only_behind`, too, only of output that begins with those ids, while the
    grammar of other output begins at once. Without a grammar, output behind the marker is free, too.
    """

    grammar: Grammar | None = None
    begin_after: list[int] = []  # token ids of a marker, such as the end of reasoning
    budget: int | None = None  # most output tokens before the marker; then the marker is forced. None: no limit
    only_behind: list[int] = []  # token ids of the marker that begins reasoning; empty: the output is inside of it
    end: str = ""  # the text of `begin_after`, which other tokens may spell; empty: its ids alone count
    other_ends: list[str] = []  # texts not allowed before `end` if a grammar follows: readers take them for an end
    # Id of a token that ends reasoning within a grammar. Behind `budget` tokens it alone is allowed where it may come
    inner_end: int | None = None
