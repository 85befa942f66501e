"""The engine of llguidance: lazy automata and an Earley parser with limits for each step. Imports no torch."""

import ctypes
import re
from typing import TYPE_CHECKING

import llguidance
import msgspec
import numpy as np
from llguidance import TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from blockyard.shared.grammars.error_texts import guidance_cause, one_line
from blockyard.shared.grammars.interface import (
    GrammarError,
    MaskWords,
    MatcherError,
    UnsupportedGrammar,
    Vocabulary,
)
from blockyard.shared.grammars.json_schemas.engine_schemas import guidance_schema, needs_escapes
from blockyard.shared.grammars.json_schemas.keywords import Schema
from blockyard.shared.grammars.json_schemas.normal_form import normal_schema
from blockyard.shared.grammars.json_schemas.rules import close_objects
from blockyard.shared.grammars.lark_sources import replace_lark_schemas
from blockyard.shared.grammars.matching import NO_TOKEN, STEP_S, MatcherRules, SequenceMatcher
from blockyard.shared.grammars.schemas import read_choices, read_schema
from blockyard.shared.grammars.token_texts import TextSpelling, load_tokenizer, special_token
from blockyard.shared.messages import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only its stub file has it

# Between JSON tokens: a blank, or a line break and its indentation. Weak models, and all at high temperatures, write
# whitespace as long as they may: of the demo model's answers two thirds, with 20 blanks anywhere.
WHITESPACE = r"\r?\n[ \t]{0,20}|[ \t]"
NAME = "guidance"
# JSON's, but for \\u: by "\\u0061" a property that the schema forbids could be named. All other text needs none, except
# schemas that have control characters themselves.
ESCAPES = 'nrbtf\\"'
# Work that one mask may take: about 14 ms in the lexer; in the parser 1 ms, up to 100 ms in an ambiguous grammar.
# A mask above it raises MatcherError.
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 20_000
MAX_ITEMS_IN_ROW = 2_000
MAX_LEXER_STATES = 100_000  # 1 to 2 KB each
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|.)", re.DOTALL)  # in EBNF
_EMPTY_RULE = re.compile(r"(?m)^[ \t]*([\w-]+)[ \t]*::=(?:\s|#[^\n]*)*(?:\Z|^[\w-]+[ \t]*::=)")
# of llguidance's errors
_UNKNOWN_COUNTS, _OVERLAP, _DEAD_END = "min/maxProperties only", "oneOf constraints are not", "NoExtension"


class GuidanceEngine:
    """One tokenizer in llguidance."""

    def __init__(self, vocabulary: Vocabulary, step_s: float = STEP_S) -> None:
        self._names = load_tokenizer(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(TokenizerWrapper(TextSpelling(self._names, vocabulary.eos_token_ids)))
        self._rules = MatcherRules(vocabulary, step_s)
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW,
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, grammar: Grammar) -> "GuidanceGrammar":
        """Raises GrammarError."""
        try:
            is_lark = grammar.kind in (GrammarKind.LARK, GrammarKind.EBNF)
            source = self._lark_source(grammar) if is_lark else _translated(grammar)
        except ValueError as e:
            raise GrammarError(one_line(e)) from e
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            error = matcher.get_error()
            raise GrammarError(_cause(error, grammar.kind == GrammarKind.LARK))
        return GuidanceGrammar(matcher, self._rules, self._mask_bytes)

    def _lark_source(self, grammar: Grammar) -> str:
        """The source with the rules of its markers, and the options of its JSON schemas."""
        source = grammar.source if grammar.kind == GrammarKind.LARK else _lark(grammar.source)
        lines = [replace_lark_schemas(source, lambda schema: _with_options(schema, grammar))]
        for index, text in enumerate(grammar.markers):
            token_id = special_token(self._names, text)
            quoted = msgspec.json.encode(text).decode()
            lines.append(f"marker_{index}: {quoted if token_id is None else f'<[{token_id}]>'}")
        return llguidance.LLMatcher.grammar_from_lark("\n".join(lines))

    @property
    def _mask_bytes(self) -> int:
        return 4 * -(-self._tokenizer.vocab_size // 32)


class GuidanceGrammar:
    """A source that llguidance has taken. Its matchers are copies, which share a lexer and its lock."""

    def __init__(self, start: llguidance.LLMatcher, rules: MatcherRules, mask_bytes: int) -> None:
        self._start, self._rules, self._mask_bytes = start, rules, mask_bytes

    def matcher(self) -> SequenceMatcher:
        return SequenceMatcher(GuidanceState(self._start.deep_copy(), self._mask_bytes), self._rules)


class GuidanceState:
    def __init__(self, matcher: llguidance.LLMatcher, mask_bytes: int) -> None:
        self.library = matcher
        self._mask_bytes = mask_bytes  # more than the model's, if the tokenizer has more ids

    def advance(self, token_id: int) -> bool:
        if not 0 <= token_id < self._mask_bytes * 8:  # an error for llguidance, which ends the matcher
            return False
        accepted = self.library.try_consume_tokens([token_id])
        self.check()
        return accepted == 1

    def write_mask(self, words: MaskWords) -> None:
        if words.nbytes == self._mask_bytes:
            self.library.unsafe_compute_mask_ptr(_address(words), words.nbytes)
        else:
            whole = np.zeros(self._mask_bytes // 4, dtype=np.int32)
            self.library.unsafe_compute_mask_ptr(_address(whole), whole.nbytes)
            words[:] = whole[: len(words)]
        self.check()

    def is_complete(self) -> bool:
        return self.library.is_accepting()

    def forced(self) -> list[int]:
        return self.library.compute_ff_tokens()

    @property
    def has_failed(self) -> bool:
        return self.library.is_error()

    def check(self) -> None:
        """Raises MatcherError if the library has failed."""
        if self.has_failed:
            raise MatcherError(_cause(self.library.get_error()))


def _address(words: MaskWords) -> int:
    """Returns `words.ctypes.data`, which itself takes ten times as long: as long as a mask."""
    return ctypes.addressof(ctypes.c_char.from_buffer(words.data))


def _translated(grammar: Grammar) -> str:
    """The grammar in a language of llguidance. Raises GrammarError or ValueError."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            return _json_grammar(grammar)
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICE:
            # one automaton: a rule of the parser for each choice would take time that is quadratic in their number
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(re.escape, read_choices(grammar.source))))
    raise UnsupportedGrammar(f"{NAME} does not support grammars of the kind {grammar.kind.value}")


def _lark(ebnf: str) -> str:
    if empty := _EMPTY_RULE.search(ebnf):
        raise GrammarError(f"rule {empty[1]} of the EBNF grammar has nothing behind its ::=")
    try:
        return str(any_to_lark(_ESCAPED.sub(_plain_character, ebnf)))
    except Exception as e:  # its parser raises bare Exception, IndexError and RecursionError
        raise GrammarError(guidance_cause(str(e), False) or f"the EBNF grammar is not valid: {type(e).__name__}") from e


def _plain_character(escape: re.Match[str]) -> str:
    """Returns a spelling that the translator of EBNF reads right: beyond ASCII the character itself."""
    code = int(escape[1] or escape[2] or escape[3] or "d800", 16)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:  # no character, or no number
        return escape[0]
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


def _json_grammar(grammar: Grammar) -> str:
    schema = read_schema(grammar.source) if grammar.kind == GrammarKind.JSON_SCHEMA else {"type": "object"}
    schema, options = _prepared(schema, grammar)
    return llguidance.LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=options)


def _with_options(source: object, grammar: Grammar) -> str:
    """A schema within Lark, with what a grammar of that schema has."""
    schema, options = _prepared(normal_schema(source), grammar)
    if schema is not False:
        schema = {**({} if schema is True else schema), "x-guidance": options}
    return msgspec.json.encode(schema).decode()


def _prepared(schema: Schema, grammar: Grammar) -> tuple[Schema, "JsonCompileOptions"]:
    """The schema in keywords that llguidance honours, and the options of its JSON. Raises GrammarError."""
    if not grammar.additional_properties:
        schema = close_objects(schema)
    schema = guidance_schema(schema)
    options: JsonCompileOptions = {"whitespace_flexible": grammar.any_whitespace}
    if grammar.whitespace_pattern or grammar.any_whitespace:
        options["whitespace_pattern"] = grammar.whitespace_pattern or WHITESPACE
    if not needs_escapes(schema):
        options["json_allowed_escapes"] = ESCAPES
    return schema, options


def _cause(error: str, has_lines: bool = False) -> str:
    """Cuts off what llguidance adds for its own developers, and quotes of the source. has_lines: it is the client's."""
    if error.startswith(_OVERLAP):
        return "oneOf is not supported where two of its schemas may allow the same value; use anyOf"
    if error.startswith(_UNKNOWN_COUNTS):
        return "minProperties and maxProperties are not supported beside properties that are not required"
    if error.startswith(_DEAD_END):
        return NO_TOKEN
    if error.startswith("panic"):
        return "the grammar is too large or too complex for llguidance"
    return guidance_cause(error.partition("<non-verbose/>")[0].partition("<backtrace>")[0], has_lines)
