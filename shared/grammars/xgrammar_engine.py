"""The engine of xgrammar. Its library imports torch and transformers, and has no limits on time or memory."""

import msgspec
import xgrammar

from blockyard.shared.grammars.error_texts import one_line, xgrammar_cause
from blockyard.shared.grammars.interface import GrammarError, MaskWords, UnsupportedGrammar, Vocabulary
from blockyard.shared.grammars.matching import MatcherRules, SequenceMatcher
from blockyard.shared.grammars.schema_rules import (
    DATES,
    HOSTS,
    Schema,
    keep_values_of_type,
    name_required,
    name_types,
    refuse_combinations,
    refuse_formats,
    refuse_overlaps,
    refuse_uncounted_properties,
    replace_formats,
)
from blockyard.shared.grammars.schemas import (
    XGRAMMAR_KEYWORDS,
    keywords,
    read_choices,
    read_object,
    read_schema,
    refuse_keywords,
    refuse_lark_schemas,
    schemas_in,
    subschemas,
)
from blockyard.shared.grammars.token_texts import token_texts
from blockyard.shared.messages import Grammar, GrammarKind

NAME = "xgrammar"
# it ignores others
FORMATS = keywords(
    "time duration email ipv4 ipv6 uuid uri uri-reference uri-template json-pointer relative-json-pointer"
)


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
                return self._schema(msgspec.json.encode(_enforced(read_schema(source))).decode(), grammar)
            case GrammarKind.JSON_OBJECT:
                return self._schema('{"type": "object"}', grammar)
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(source)
            case GrammarKind.CHOICE:
                choices = " | ".join(map(_literal, read_choices(source)))
                return self._compiler.compile_grammar(f"root ::= {choices}")
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(source)
            case GrammarKind.LARK:
                refuse_lark_schemas(source, NAME)
                return self._compiler.compile_lark(source)
            case GrammarKind.STRUCTURAL_TAG:
                return self._compiler.compile_structural_tag(_structural_tag(source))

    def _schema(self, source: str, grammar: Grammar) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(
            source, any_whitespace=grammar.any_whitespace, strict_mode=not grammar.additional_properties
        )


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

    def roll_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def copy(self) -> "XgrammarState":
        return XgrammarState(self._matcher.fork())


def _enforced(schema: Schema) -> Schema:
    """The schema in keywords that xgrammar honours. Raises GrammarError."""
    refuse_keywords(schema, XGRAMMAR_KEYWORDS, NAME)
    name_required(name_types(keep_values_of_type(schema)))
    refuse_combinations(schema, NAME)
    refuse_formats(replace_formats(schema, DATES | HOSTS), FORMATS, NAME)
    refuse_overlaps(schema, NAME)
    refuse_uncounted_properties(schema, NAME)
    for part in subschemas(schema):
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _pattern(pattern)
        elif part.keys() & {"minLength", "maxLength"}:  # by these alone it would let control characters in
            least, most = part.pop("minLength", 0), part.pop("maxLength", "")
            part["pattern"] = f"^.{{{least},{most}}}$"
    return schema


def _pattern(pattern: str) -> str:
    """The pattern in what xgrammar reads right in strings of JSON: `(x)?` becomes `(x|)`. Raises UnsupportedGrammar."""
    if '"' in pattern or "\\\\" in pattern:
        raise UnsupportedGrammar(f"{NAME} does not support quotes and backslashes in `pattern`")
    out, is_in_class, at = "", False, 0
    while at < len(pattern):
        token = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(token)
        if token in ("[", "]"):
            is_in_class = token == "["
        if token == ")" and not is_in_class and pattern[at : at + 1] == "?":
            lazy = pattern[at + 1 : at + 2] == "?"
            token, at = "|)", at + 1 + lazy
        out += token
    return out


def _structural_tag(source: str) -> str:
    """Reads both spellings: one format, or the older list of structures with triggers. Raises GrammarError."""
    tag = read_object(source, "the structural tag")
    if "format" not in tag and {"structures", "triggers"} <= tag.keys():
        try:
            items = [xgrammar.StructuralTagItem(**structure) for structure in tag["structures"]]
            tag = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"]).model_dump(mode="json")
        except (TypeError, ValueError) as e:  # pydantic's errors are ValueErrors
            raise GrammarError(f"the structural tag is not valid: {one_line(e)}") from e
    for schema in schemas_in(tag):
        _enforced(schema)  # changes the schema in the tag
    return msgspec.json.encode(tag).decode()


def _literal(text: str) -> str:
    """A string of xgrammar's EBNF."""
    return '"' + "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'
