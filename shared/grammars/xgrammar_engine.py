"""The engine of xgrammar. Its library imports torch and transformers, and has no limits on time or memory."""

import re
from typing import Any

import msgspec
import xgrammar

from blockyard.shared.grammars.error_texts import one_line, xgrammar_cause
from blockyard.shared.grammars.interface import GrammarError, MaskWords, UnsupportedGrammar, Vocabulary
from blockyard.shared.grammars.json_schemas.engine_schemas import refuse_lark_schema, xgrammar_schema
from blockyard.shared.grammars.json_schemas.keywords import Schema
from blockyard.shared.grammars.json_schemas.patterns import misread, with_whole_characters
from blockyard.shared.grammars.lark_sources import replace_lark_schemas
from blockyard.shared.grammars.matching import MatcherRules, SequenceMatcher
from blockyard.shared.grammars.schemas import read_choices, read_object, read_schema, replace_schemas
from blockyard.shared.grammars.token_texts import token_texts
from blockyard.shared.messages import Grammar, GrammarKind

NAME = "xgrammar"
MOST_WHITESPACE = 21  # characters between JSON tokens, of any kind: a line break and its indentation
# Escapes within strings: "\\u0061" would be another spelling of a name that the schema knows. JSON needs no others.
# Rules of a client that have such a name in a structural tag have other bodies. A compiled grammar's have a lookahead.
_HEX = r" \[A-Fa-f0-9\]" * 4
_ESCAPES = re.compile(
    rf'^(\w*basic_escape\w*) ::= \(\(\[\\"\\\\/bfnrt\]\) \| \("u"{_HEX}\)\)(?: \(=.*\))?$', re.MULTILINE
)
_FEW_ESCAPES = r'\1 ::= ["\\\\bfnrt]'


class XgrammarEngine:
    """One tokenizer in xgrammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rules = MatcherRules(vocabulary)
        info = xgrammar.TokenizerInfo(
            token_texts(vocabulary),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=sorted(self._rules.eos_ids) or None,
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> "XgrammarGrammar":
        """Raises GrammarError."""
        if grammar.whitespace_pattern:
            raise UnsupportedGrammar(f"{NAME} does not support whitespace_pattern")
        try:
            return XgrammarGrammar(self._compile(grammar), self._rules)
        except (RuntimeError, ValueError) as e:
            raise GrammarError(xgrammar_cause(str(e))) from e

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        source = grammar.source
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._schema(read_schema(source), grammar)
            case GrammarKind.JSON_OBJECT:
                return self._schema({"type": "object"}, grammar)
            case GrammarKind.REGEX:
                if fault := misread(source):
                    raise UnsupportedGrammar(f"{NAME} does not support {fault} in regular expressions")
                return self._compiler.compile_regex(source)
            case GrammarKind.CHOICE:
                choices = " | ".join(map(_literal, read_choices(source)))
                return self._compiler.compile_grammar(f"root ::= {choices}")
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(with_whole_characters(source))
            case GrammarKind.LARK:
                return self._compiler.compile_lark(replace_lark_schemas(source, refuse_lark_schema))
            case GrammarKind.STRUCTURAL_TAG:
                return self._with_few_escapes(self._tag_rules(_structural_tag(source)))

    def _schema(self, schema: Schema, grammar: Grammar) -> xgrammar.CompiledGrammar:
        source = msgspec.json.encode(xgrammar_schema(schema, grammar.additional_properties)).decode()
        rules = xgrammar.Grammar.from_json_schema(
            source,
            any_whitespace=grammar.any_whitespace,
            strict_mode=False,
            max_whitespace_cnt=MOST_WHITESPACE if grammar.any_whitespace else None,
        )
        return self._with_few_escapes(rules)

    def _tag_rules(self, tag: str) -> xgrammar.Grammar:
        try:
            return xgrammar.Grammar.from_structural_tag(tag)
        except (RuntimeError, ValueError):  # tokens given by their texts need the vocabulary
            return self._compiler.compile_structural_tag(tag).grammar

    def _with_few_escapes(self, rules: xgrammar.Grammar) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_grammar(_ESCAPES.sub(_FEW_ESCAPES, str(rules)))


class XgrammarGrammar:
    """A source that xgrammar has taken."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, rules: MatcherRules) -> None:
        self._compiled, self._rules = compiled, rules

    def matcher(self) -> SequenceMatcher:
        return SequenceMatcher(XgrammarState(xgrammar.GrammarMatcher(self._compiled)), self._rules)


class XgrammarState:
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def advance(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def write_mask(self, words: MaskWords) -> None:
        self._matcher.fill_next_token_bitmask(words[None, :])

    def is_complete(self) -> bool:
        return self._matcher.is_completed()

    def forced(self) -> list[int]:
        return []  # xgrammar knows the forced text, but not how the tokenizer would spell it


def _structural_tag(source: str) -> str:
    """Reads both spellings: one format, or the older list of structures with triggers. Raises GrammarError."""
    tag = read_object(source, "the structural tag")
    if "format" not in tag and {"structures", "triggers"} <= tag.keys():
        try:
            items = [xgrammar.StructuralTagItem(**structure) for structure in tag["structures"]]
            tag = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"]).model_dump(mode="json")
        except (TypeError, ValueError) as e:  # pydantic's errors are ValueErrors
            raise GrammarError(f"the structural tag is not valid: {one_line(e)}") from e
    replace_schemas(tag, xgrammar_schema)
    _bound_whitespace(tag)
    return msgspec.json.encode(tag).decode()


def _bound_whitespace(tag: dict[str, Any]) -> None:
    """Bounds the whitespace of the JSON in a structural tag where its author has not."""
    waiting: list[object] = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            if part.get("type") == "json_schema" and part.get("max_whitespace_cnt") is None:
                part["max_whitespace_cnt"] = MOST_WHITESPACE
            waiting += [value for keyword, value in part.items() if keyword != "json_schema"]


def _literal(text: str) -> str:
    """A string of xgrammar's EBNF."""
    return '"' + "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'
