"""The engine of lm-format-enforcer: parsers of characters, walked along a tree of all tokens in Python.

Its numbers are looser than JSON's (`2.e5`, integers that overflow): an answer may hold one that no JSON parser reads.
"""

import re
import threading

from lmformatenforcer import (
    CharacterLevelParser,
    JsonSchemaParser,
    RegexParser,
    StringParser,
    TokenEnforcer,
    TokenEnforcerTokenizerData,
    UnionParser,
)

from blockyard.shared.grammars.error_texts import one_line
from blockyard.shared.grammars.interface import GrammarError, MaskWords, UnsupportedGrammar, Vocabulary
from blockyard.shared.grammars.json_schemas.engine_schemas import enforcer_schema
from blockyard.shared.grammars.json_schemas.keywords import Schema, subschemas
from blockyard.shared.grammars.matching import MatcherRules, SequenceMatcher, set_bits
from blockyard.shared.grammars.schemas import read_choices, read_schema
from blockyard.shared.grammars.token_texts import token_texts
from blockyard.shared.messages import Grammar, GrammarKind

NAME = "lm-format-enforcer"
STEP_S = 2.0  # masks are made in Python: a first one may take a second at 128k tokens
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # it lets them into strings of JSON


class LmFormatEnforcerEngine:
    """One tokenizer in lm-format-enforcer. Parts of characters and control characters are never allowed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rules = MatcherRules(vocabulary, STEP_S)
        self._texts: dict[int, str] = {}
        for token_id, data in enumerate(token_texts(vocabulary)):
            text = data.decode("utf-8", "replace")
            if text and "\ufffd" not in text and not _CONTROLS.search(text):
                self._texts[token_id] = text
        tokens = [(token_id, text, True) for token_id, text in self._texts.items()]
        self._data = TokenEnforcerTokenizerData(
            tokens, lambda ids: "", sorted(self._rules.eos_ids), False, vocabulary.vocab_size
        )

    def compile(self, grammar: Grammar) -> "LmFormatEnforcerGrammar":
        """Raises GrammarError."""
        if grammar.whitespace_pattern:
            raise UnsupportedGrammar(f"{NAME} does not support whitespace_pattern")
        if not grammar.any_whitespace:
            raise UnsupportedGrammar(f"{NAME} does not support disable_any_whitespace")
        try:
            parser = self._parser(grammar)
            return LmFormatEnforcerGrammar(TokenEnforcer(self._data, parser), parser, self._texts, self._rules)
        except GrammarError:
            raise
        except Exception as e:  # the library raises bare Exception, RecursionError and errors of pydantic
            raise GrammarError(one_line(e) or f"no valid {grammar.kind.value}: {type(e).__name__}") from e

    def _parser(self, grammar: Grammar) -> CharacterLevelParser:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return JsonSchemaParser(_without_blanks(enforcer_schema(read_schema(grammar.source))))
            case GrammarKind.JSON_OBJECT:
                return JsonSchemaParser({"type": "object"})
            case GrammarKind.REGEX:
                return RegexParser(grammar.source.removeprefix("^").removesuffix("$"))
            case GrammarKind.CHOICE:
                choices = read_choices(grammar.source)
                missing = set("".join(choices)) - set(self._data.tokenizer_alphabet)
                if missing:
                    raise GrammarError(f"{NAME} knows no token of these characters: {''.join(sorted(missing)[:20])}")
                return UnionParser([StringParser(choice) for choice in choices])
        raise UnsupportedGrammar(f"{NAME} does not support grammars of the kind {grammar.kind.value}")


def _without_blanks(schema: Schema) -> Schema:
    """Raises UnsupportedGrammar for a pattern that may begin with a blank: it lets any number of them through."""
    for part in subschemas(schema):
        if "pattern" in part and not set(" \t\n\r").isdisjoint(RegexParser(part["pattern"]).get_allowed_characters()):
            raise UnsupportedGrammar(f"{NAME} does not support a blank at the beginning of `pattern`")
    return schema


class LmFormatEnforcerGrammar:
    """A source that lm-format-enforcer has taken."""

    def __init__(
        self, enforcer: TokenEnforcer, parser: CharacterLevelParser, texts: dict[int, str], rules: MatcherRules
    ) -> None:
        self._masks, self._parser, self._texts, self._rules = TokenTree(enforcer), parser, texts, rules

    def matcher(self) -> SequenceMatcher:
        return SequenceMatcher(EnforcerState(self._masks, self._texts, self._parser), self._rules)


class TokenTree:
    """Walks the tree of tokens. The parsers of a grammar share state, so one thread at a time does."""

    def __init__(self, enforcer: TokenEnforcer) -> None:
        self._enforcer = enforcer
        self.lock = threading.Lock()

    def write(self, parser: CharacterLevelParser, words: MaskWords) -> None:
        with self.lock:
            # the enforcer keeps what it knows by the whole sequence; as the root of an empty one, a parser is enough
            self._enforcer.root_parser = parser
            self._enforcer.prefix_states.clear()
            set_bits(words, self._enforcer.get_allowed_tokens([]).allowed_tokens)


class EnforcerState:
    def __init__(self, masks: TokenTree, texts: dict[int, str], parser: CharacterLevelParser) -> None:
        self._masks, self._texts, self._parser = masks, texts, parser

    def advance(self, token_id: int) -> bool:
        text = self._texts.get(token_id, "")
        parser = self._parser
        with self._masks.lock:
            for character in text:
                if character not in parser.get_allowed_characters():
                    return False
                parser = parser.add_character(character)
                _forget_blanks(parser)
        if text:
            self._parser = parser
        return bool(text)

    def write_mask(self, words: MaskWords) -> None:
        self._masks.write(self._parser, words)

    def is_complete(self) -> bool:
        with self._masks.lock:
            return bool(self._parser.can_end())

    def forced(self) -> list[int]:
        return []


def _forget_blanks(parser: CharacterLevelParser) -> None:
    """Counts no blanks within a string: the limit is for those between values, and masks of free text know none."""
    for one in parser.parsers if isinstance(parser, UnionParser) else (parser,):
        if isinstance(one, JsonSchemaParser) and one.shortcut_key() is not None:
            one.num_consecutive_whitespaces = 0
