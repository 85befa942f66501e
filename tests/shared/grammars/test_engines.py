"""One test for all engines: masks against each text of small languages, and the states of matchers."""

import json
import random

import jsonschema
import numpy as np
import pytest
from grammar_rig import (
    ALL,
    ENFORCER,
    EOS,
    FINITE,
    GUIDANCE,
    OUTLINES,
    SCHEMA,
    SOURCES,
    SUPPORTS,
    VOCABULARY,
    grammar,
    mask,
)
from grammar_rig import XGRAMMAR as XG
from tokenizers import Tokenizer

from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.guidance import GuidanceEngine
from blockyard.shared.grammars.interface import GrammarError, Matcher, MatcherError, UnsupportedGrammar, Vocabulary
from blockyard.shared.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarEngine, GrammarKind


def is_character_start(data: bytes) -> bool:
    """False for bytes with a part of a character, which lm-format-enforcer never allows."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def expected(texts: list[bytes], language: list[bytes], so_far: bytes, whole: bool) -> set[int]:
    """Tokens after which the text is still the start of one in the language."""
    rest = {text[len(so_far) :] for text in language if text.startswith(so_far)}
    starts = {text[:n] for text in rest for n in range(1, len(text) + 1)}
    ids = {i for i, data in enumerate(texts) if data in starts and not (whole and not is_character_start(data))}
    return ids | (set(EOS) if b"" in rest else set())


CASES = [(e, name) for e in ALL for name, (kind, _, _) in FINITE.items() if kind in SUPPORTS[e]]


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_a_token_is_allowed_if_the_text_with_it_is_a_start_of_a_valid_one(
    engines: Engines, texts: list[bytes], engine: GrammarEngine, name: str
) -> None:
    kind, source, language = FINITE[name]
    if engine == ENFORCER and name == "choice":
        with pytest.raises(GrammarError, match=r"no token of these characters: .*東"):
            engines.compile(grammar(kind, source, engine))
        language = [text for text in language if text.isascii()]
        source = json.dumps(language)
    compiled = engines.compile(grammar(kind, source, engine))
    data = [text.encode() for text in language]
    rng = random.Random(name)
    for _ in range(12):
        matcher, so_far = compiled.matcher(), b""
        while True:
            allowed, right = mask(matcher), expected(texts, data, so_far, engine == ENFORCER)
            if len(so_far) > 8 and "recursion" in name:
                break  # the list has the short texts only
            if engine == GUIDANCE and not matcher.is_complete():
                # a forced text is spelled as the tokenizer spells it, in this way alone
                assert allowed and allowed <= right
                if len({texts[i][:1] for i in right}) > 1:
                    assert allowed == right, so_far
            elif engine == OUTLINES:  # it leaves out tokens that end one byte behind a whole text
                assert allowed <= right and {i for i in right if so_far + texts[i][:-1] not in data} <= allowed
            else:
                assert allowed == right, so_far
            assert matcher.is_complete() == (so_far in data)
            token = rng.choice(sorted(allowed))
            assert matcher.accept([token]) == 1
            if token in EOS:
                assert so_far in data
                break
            so_far += texts[token]


@pytest.mark.parametrize("engine", ALL)
def test_a_sequence_that_ended_takes_end_of_sequence_ids_alone(engines: Engines, engine: GrammarEngine) -> None:
    compiled = engines.compile(grammar(GrammarKind.REGEX, "ab?", engine))
    matcher = compiled.matcher()
    tokenizer = Tokenizer.from_str(VOCABULARY.tokenizer_json)
    a, b = (tokenizer.token_to_id(c) for c in "ab")
    assert matcher.accept([EOS[0]]) == 0 and not matcher.is_complete()
    assert matcher.accept([a, EOS[1], b]) == 2
    assert matcher.is_complete() and mask(matcher) == set(EOS) and matcher.forced() == []
    assert matcher.accept([EOS[0]]) == 1
    matcher = compiled.matcher()
    assert matcher.accept([a]) == 1 and mask(matcher) == {*EOS, b}
    assert matcher.accept([b]) == 1 and mask(matcher) == set(EOS)  # nothing else may follow
    assert matcher.accept([b]) == 0 and mask(matcher) == set(EOS)
    matcher = compiled.matcher()
    assert not matcher.is_complete() and matcher.accept([b]) == 0 and matcher.accept([a, b]) == 2


@pytest.mark.parametrize("engine", ALL)
def test_matchers_go_on_independently(engines: Engines, tokenizer: Tokenizer, engine: GrammarEngine) -> None:
    compiled = engines.compile(grammar(GrammarKind.REGEX, "x(ab|cd)+y", engine))
    x, a, b, c, d, y = (tokenizer.token_to_id(t) for t in "xabcdy")
    matcher, other = compiled.matcher(), compiled.matcher()
    assert matcher.accept([x, a]) == 2
    before = mask(matcher)
    assert other.accept([x, c, d, y]) == 4 and other.is_complete() and mask(matcher) == before
    assert matcher.accept([c]) == 0 and matcher.accept([b, y, EOS[0]]) == 3


@pytest.mark.parametrize("engine", ALL)
def test_ids_without_a_text_are_never_allowed(engines: Engines, texts: list[bytes], engine: GrammarEngine) -> None:
    """Special tokens and ids past the tokenizer's: everything that has a text may follow here."""
    matcher = engines.compile(grammar(GrammarKind.REGEX, r"(.|\n|\r)*", engine)).matcher()
    allowed = mask(matcher)
    assert len(allowed) > 3500 and set(EOS) <= allowed
    assert all(texts[i] for i in allowed - set(EOS))
    for token_id in (0, 2, len(texts) - 1, len(texts) + 1000):
        assert matcher.accept([token_id]) == 0
    assert mask(matcher) == allowed


def written(matcher: Matcher, texts: list[bytes], rng: random.Random, most: int = 300) -> bytes | None:
    """A text that random allowed tokens write; None if it does not end."""
    out = b""
    for _ in range(most):
        every = sorted(mask(matcher))
        allowed = [i for i in every if texts[i].strip()] or every
        token = next((i for i in EOS if i in allowed), None) or rng.choice(allowed)
        assert matcher.accept([token]) == 1
        if token in EOS:
            return out
        out += texts[token]
    return None


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("options", [{}, {"additional_properties": False}, {"any_whitespace": False}])
def test_what_a_schema_lets_through_is_valid(
    engines: Engines, texts: list[bytes], engine: GrammarEngine, options: dict[str, bool]
) -> None:
    schema = grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), engine, **options)
    if engine == ENFORCER and "any_whitespace" in options:
        with pytest.raises(UnsupportedGrammar, match="disable_any_whitespace"):
            engines.compile(schema)
        return
    compiled = engines.compile(schema)
    rng = random.Random(7)
    ended = [text for text in (written(compiled.matcher(), texts, rng) for _ in range(12)) if text is not None]
    assert len(ended) >= 3
    for text in ended:
        value = json.loads(text, strict=engine in (GUIDANCE, OUTLINES))  # the others let control characters in
        if engine != ENFORCER:  # which takes 1e999 for an integer
            jsonschema.validate(value, SCHEMA)
        assert value.keys() == SCHEMA["properties"].keys() and value["kind"] in ("a", "b", "c d")
        if options.get("additional_properties") is False:
            assert all(set(tag) == {"id"} for tag in value["tags"])
        if options.get("any_whitespace") is False:
            assert b"\n" not in text and b"\t" not in text


VALUE = {"name": "né 🎉", "kind": "b", "tags": [{"id": -17}]}


@pytest.mark.parametrize("engine", ALL)
def test_valid_values_are_let_through(engines: Engines, tokenizer: Tokenizer, engine: GrammarEngine) -> None:
    compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), engine))
    matcher = compiled.matcher()
    value = VALUE if engine != ENFORCER else {**VALUE, "name": "plain"}
    ids = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False).ids
    for token in ids:
        assert token in mask(matcher)
        assert matcher.accept([token]) == 1
    assert matcher.is_complete() and matcher.accept([EOS[0]]) == 1
    assert compiled.matcher().accept(ids) == len(ids)


def test_properties_that_a_schema_does_not_name(engines: Engines, tokenizer: Tokenizer) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    more = tokenizer.encode('{"a": 1, "b": 2}', add_special_tokens=False).ids
    for engine in (GUIDANCE, XG):  # the others allow no more than the schema names
        for open_ in (True, False):
            source = grammar(GrammarKind.JSON_SCHEMA, schema, engine, additional_properties=open_)
            matcher = engines.compile(source).matcher()
            assert (matcher.accept(more) == len(more)) is open_, engine


def test_forced_tokens(engines: Engines, tokenizer: Tokenizer) -> None:
    matcher = engines.compile(grammar(GrammarKind.REGEX, "(return|def) the first time", GUIDANCE)).matcher()
    assert matcher.forced() == []
    matcher.accept([tokenizer.token_to_id("d")])
    forced = matcher.forced()
    assert tokenizer.decode(forced) == "ef the first time" and matcher.accept(forced) == len(forced)
    assert matcher.is_complete() and matcher.forced() == []


def test_the_whitespace_pattern_is_honoured_or_refused(engines: Engines, tokenizer: Tokenizer) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]})
    for engine in (GUIDANCE, OUTLINES):
        compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, schema, engine, whitespace_pattern="[_]?"))
        matcher = compiled.matcher()
        odd = tokenizer.encode('{_"a":null}', add_special_tokens=False).ids
        assert matcher.accept(odd) == len(odd) and matcher.is_complete(), engine
        spaced = tokenizer.encode('{ "a":null}', add_special_tokens=False).ids
        assert compiled.matcher().accept(spaced) < len(spaced)
    for engine in (XG, ENFORCER):
        with pytest.raises(UnsupportedGrammar, match=f"{engine.value} does not support whitespace_pattern"):
            engines.compile(grammar(GrammarKind.JSON_SCHEMA, schema, engine, whitespace_pattern="[_]?"))
    with pytest.raises(GrammarError, match="exclude each other"):
        engines.compile(
            grammar(GrammarKind.JSON_SCHEMA, schema, GUIDANCE, whitespace_pattern=" ?", any_whitespace=False)
        )


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("kind", GrammarKind)
def test_kinds_that_an_engine_does_not_know_are_named(
    engines: Engines, engine: GrammarEngine, kind: GrammarKind
) -> None:
    source = grammar(kind, SOURCES[kind], engine)
    if kind in SUPPORTS[engine]:
        assert mask(engines.compile(source).matcher())
    else:
        with pytest.raises(UnsupportedGrammar, match=f"^{engine.value} does not support .* {kind.value}$"):
            engines.compile(source)


@pytest.mark.parametrize("new", [True, False])
def test_structural_tags(engines: Engines, tokenizer: Tokenizer, new: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    source: dict[str, object] = {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]},
    }
    if not new:
        structure = {"begin": "<f=a>", "schema": schema, "end": "</f>"}
        source = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="]}
    found = engines.resolve(grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(source), GrammarEngine.AUTO))
    assert found.engine == XG
    compiled = engines.compile(found)
    for text, whole in (('free text <f=a>{"a": 5}</f> more', True), ('<f=a>{"a": "x"}', False), ("<f=b>", False)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        matcher = compiled.matcher()
        assert (matcher.accept(ids) == len(ids)) is whole and (not whole or matcher.is_complete()), text
    schema["not"] = {}
    with pytest.raises(UnsupportedGrammar, match="not"):
        engines.compile(grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(source), XG))


BAD: dict[str, tuple[GrammarKind, str, str]] = {
    "no JSON": (GrammarKind.JSON_SCHEMA, "{", "not valid JSON"),
    "an empty text": (GrammarKind.JSON_SCHEMA, '""', "a JSON schema is an object or a boolean, not a string"),
    "nothing": (GrammarKind.JSON_SCHEMA, "", "not valid JSON"),
    "a list": (GrammarKind.JSON_SCHEMA, "[1]", "not a list"),
    "an empty list": (GrammarKind.JSON_SCHEMA, "[]", "not an empty list"),
    "unknown type": (GrammarKind.JSON_SCHEMA, '{"type": "strng"}', "strng"),
    "reference to nowhere": (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/x"}', "[dD]ef"),
    "circle": (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "."),
    "deep": (GrammarKind.JSON_SCHEMA, '{"items":' * 3000 + "{}" + "}" * 3000, "."),
    "no value": (GrammarKind.JSON_SCHEMA, '{"enum": []}', "."),
    "uniqueItems": (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "not": (GrammarKind.JSON_SCHEMA, '{"items": {"not": {"type": "null"}}, "type": "array"}', "not"),
    "if": (GrammarKind.JSON_SCHEMA, '{"type": "string", "if": {}, "then": {"minLength": 3}}', "if.*then"),
    "open group": (GrammarKind.REGEX, "(a", "."),
    "back reference": (GrammarKind.REGEX, r"(a)\1", "."),
    "empty regex language": (GrammarKind.REGEX, r"[^\s\S]", "."),
    "no choice": (GrammarKind.CHOICE, "[]", "empty"),
    "choice of numbers": (GrammarKind.CHOICE, "[1]", "list of strings"),
    "choice of no JSON": (GrammarKind.CHOICE, "yes", "not valid JSON"),
    "unknown rule": (GrammarKind.EBNF, "root ::= foo", "foo"),
    "no rule": (GrammarKind.EBNF, "garbage", "."),
    "endless rule": (GrammarKind.EBNF, 'root ::= root "a"', "no first token"),
    "no start": (GrammarKind.LARK, 'foo: "a"', "start"),
    "unknown name": (GrammarKind.LARK, "start: foo", "foo"),
    "no format": (GrammarKind.STRUCTURAL_TAG, "{}", "format"),
    "tag of no JSON": (GrammarKind.STRUCTURAL_TAG, "<f>", "not valid JSON"),
    "10 MB": (GrammarKind.REGEX, "a" * 10_000_000, f"10000000 bytes; at most {MAX_GRAMMAR_BYTES}"),
}
BAD_CASES = [(engine, name) for engine in ALL for name, (kind, _, _) in BAD.items() if kind in SUPPORTS[engine]]


@pytest.mark.parametrize(("engine", "name"), BAD_CASES)
def test_bad_sources_are_refused_with_their_cause(engines: Engines, engine: GrammarEngine, name: str) -> None:
    kind, source, cause = BAD[name]
    with pytest.raises(GrammarError, match=cause) as error:
        engines.compile(grammar(kind, source, engine))
    message = str(error.value)
    assert message.strip() and len(message) < 1000 and "\n" not in message and "/project/" not in message


LONG = "secret_" * 10
QUOTING = {  # a source with an error, and a part of the cause; {} is text that no error should quote
    "regex": (
        GrammarKind.REGEX,
        "({}",
        {GUIDANCE: r"^invalid regex: unclosed group$", XG: "parenthesis is not closed"},
    ),
    "look-around": (GrammarKind.REGEX, "(?={})x", {GUIDANCE: "^invalid regex: look-around", XG: "look-around"}),
    "open text": (
        GrammarKind.EBNF,
        'root ::= "{}',
        {GUIDANCE: r"^Unexpected end of input at line 1$", XG: "^EBNF lexer error at line 1, column 81: Expect"},
    ),
    "class": (GrammarKind.EBNF, 'root ::= "{}" [z-a]', {GUIDANCE: "^invalid regex: invalid character class range"}),
    "rule": (
        GrammarKind.LARK,
        'start: "{0}" foo\nbar: "{0}"',
        {GUIDANCE: r'^line 1, column 8: unknown name: "foo"$', XG: "unknown name 'foo'$"},
    ),
    "lexer": (
        GrammarKind.LARK,
        'start: "{}',
        {GUIDANCE: r"^line 1, column \d+: lexer error$", XG: "unterminated string"},
    ),
    "pattern": (
        GrammarKind.JSON_SCHEMA,
        '{{"type": "string", "pattern": "({}"}}',
        {GUIDANCE: "^invalid regex: unclosed group$", XG: "parenthesis is not closed"},
    ),
    "type": (GrammarKind.JSON_SCHEMA, '{{"type": "{}"}}', {GUIDANCE: r"^\.\.\. is no type of JSON schemas$"}),
    "tag": (
        GrammarKind.STRUCTURAL_TAG,
        '{{"type": "structural_tag", "format": {{"type": "{}"}}}}',
        {XG: r"^Invalid structural tag error: Format type not recognized: \.\.\.$"},
    ),
}


@pytest.mark.parametrize("name", QUOTING)
def test_errors_say_the_cause_and_do_not_quote_the_source(engines: Engines, name: str) -> None:
    kind, source, causes = QUOTING[name]
    for engine, cause in causes.items():
        with pytest.raises(GrammarError, match=cause) as error:
            engines.compile(grammar(kind, source.format(LONG), engine))
        assert "secret" not in str(error.value) and "/project/" not in str(error.value)


def test_auto_takes_guidance_and_xgrammar_for_the_rest(engines: Engines) -> None:
    auto = GrammarEngine.AUTO
    for kind, source in SOURCES.items():
        found = engines.resolve(grammar(kind, source, auto))
        assert found == Grammar(kind, source, XG if kind == GrammarKind.STRUCTURAL_TAG else GUIDANCE)
    assert engines.resolve(grammar(GrammarKind.REGEX, "a", OUTLINES)).engine == OUTLINES
    with pytest.raises(
        UnsupportedGrammar, match=r"guidance does not support .*: uniqueItems"
    ):  # the first engine's words
        engines.resolve(grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', auto))
    with pytest.raises(GrammarError, match="strng"):
        engines.resolve(grammar(GrammarKind.JSON_SCHEMA, '{"type": "strng"}', auto))


def test_the_engines_of_auto_load_no_torch_until_xgrammar_is_needed() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from blockyard.shared.grammars.engines import Engines;"
        "from grammar_rig import VOCABULARY; from blockyard.shared.messages import *;"
        "Engines(VOCABULARY).resolve(Grammar(GrammarKind.JSON_OBJECT, ''));"
        "Engines(VOCABULARY).resolve(Grammar(GrammarKind.REGEX, 'a+'));"
        "print([m for m in ('torch', 'transformers', 'xgrammar', 'outlines_core', 'zmq') if m in sys.modules])"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.stdout.strip() == b"[]", done.stderr


def test_a_vocabulary_that_cannot_spell_a_grammar() -> None:
    tokenizer = Tokenizer.from_str(VOCABULARY.tokenizer_json)
    small = Engines(Vocabulary(tokenizer.to_str(), 90, EOS))  # of the first ids alone
    assert mask_of(small, "[a-c!]+", 90) == {tokenizer.token_to_id(c) for c in "abc!"} - set(range(90, 4096))
    with pytest.raises(GrammarError, match="no first token"):
        small.compile(Grammar(GrammarKind.REGEX, "é", GUIDANCE))
    for engine in (XG, OUTLINES, ENFORCER):
        with pytest.raises(GrammarError):
            small.compile(Grammar(GrammarKind.REGEX, "é", engine))


def mask_of(engines: Engines, regex: str, vocab_size: int) -> set[int]:
    matcher = engines.compile(Grammar(GrammarKind.REGEX, regex, GUIDANCE)).matcher()
    words = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    matcher.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_a_mask_over_the_limits_of_a_step_ends_the_matcher(tokenizer: Tokenizer) -> None:
    """The rows of an ambiguous grammar's parser grow with each token."""
    source = 'start: s\ns: s s s | s s | "a" |'
    matcher = GuidanceEngine(VOCABULARY, step_s=0.005).compile(Grammar(GrammarKind.LARK, source, GUIDANCE)).matcher()
    a = tokenizer.token_to_id("a")
    with pytest.raises(MatcherError, match="for one token"):
        for _ in range(2000):
            matcher.accept([a])
            mask(matcher)


def test_a_mask_has_the_vocabulary_s_shape(engines: Engines) -> None:
    matcher = engines.compile(grammar(GrammarKind.REGEX, "a", GUIDANCE)).matcher()
    with pytest.raises(ValueError, match="131 contiguous int32"):
        matcher.fill(np.zeros(8, dtype=np.int32))


def test_texts_of_other_tokenizers(byte_tokenizer: Tokenizer, word_tokenizer: Tokenizer) -> None:
    from blockyard.shared.grammars.token_texts import token_texts

    texts = token_texts(Vocabulary(byte_tokenizer.to_str(), 410, [1]))
    assert texts[byte_tokenizer.token_to_id("[TOOL]")] == b"[TOOL]" and texts[402:] == [b""] * 8
    with pytest.raises(GrammarError, match="tokenizer of this model"):
        Engines(Vocabulary(word_tokenizer.to_str(), 300, [1])).compile(Grammar(GrammarKind.REGEX, "a", GUIDANCE))


def marked(engine: GrammarEngine) -> Grammar:
    return grammar(GrammarKind.LARK, 'start: marker_1 "x" marker_0', engine, markers=["<call>", "<|pad|>"])


def test_markers_are_special_tokens_where_the_tokenizer_has_them(engines: Engines, tokenizer: Tokenizer) -> None:
    pad, x = tokenizer.token_to_id("<|pad|>"), tokenizer.token_to_id("x")
    call = tokenizer.encode("<call>", add_special_tokens=False).ids
    assert len(call) > 1
    matcher = engines.compile(marked(GUIDANCE)).matcher()
    assert mask(matcher) == {pad}
    assert matcher.accept([pad, x, *call]) == 2 + len(call) and matcher.is_complete()
    spelt = tokenizer.encode("<|pad", add_special_tokens=False).ids
    assert engines.compile(marked(GUIDANCE)).matcher().accept(spelt) == 0


@pytest.mark.parametrize("engine", [XG, OUTLINES, ENFORCER])
def test_other_engines_refuse_markers(engines: Engines, engine: GrammarEngine) -> None:
    with pytest.raises(UnsupportedGrammar, match=f"{engine.value} does not support grammars with markers"):
        engines.resolve(marked(engine))


def test_schemas_in_lark_are_for_one_engine(engines: Engines) -> None:
    """xgrammar compiles them, and ignores `maxLength` and other keywords."""
    counts = 'start: value\nvalue: %json {"type": "object", "minProperties": 4}'
    for source, engine in ((counts, GrammarEngine.AUTO), ("start: %json {}", XG)):
        with pytest.raises(UnsupportedGrammar, match=r"supports minProperties up|does not support %json"):
            engines.resolve(grammar(GrammarKind.LARK, source, engine))


def test_a_rule_of_lark_that_is_a_schema_is_as_strict_as_a_schema(engines: Engines, tokenizer: Tokenizer) -> None:
    schema = json.dumps({"properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]})
    source = f'start: "(" value ")"\nvalue: %json {schema}'

    def num_accepted(text: str, **options: object) -> int:
        matcher = engines.compile(grammar(GrammarKind.LARK, source, GUIDANCE, **options)).matcher()
        return matcher.accept([i for char in text for i in tokenizer.encode(char, add_special_tokens=False).ids])

    right = '({"day": "2024-02-29", "more": "a"})'
    assert num_accepted(right) == len(right)
    assert num_accepted('({"day": "2023-02-29"') < 20
    assert num_accepted('({"day": "2024-02-29", "\\u0061') == 25
    assert num_accepted("({\n" + " " * 30) == 23 and num_accepted("({" + " " * 30) == 3
    assert num_accepted('({"day": "2024-02-29", "more"', additional_properties=False) == 21
    assert num_accepted('({"day": "2024-02-29",  "m', any_whitespace=False) == 8


@pytest.mark.parametrize("engine", [XG, ENFORCER])
def test_blanks_in_a_string_are_not_counted(
    engines: Engines, engine: GrammarEngine, texts: list[bytes], tokenizer: Tokenizer
) -> None:
    """What a mask of free text allows may follow; the vocabulary has tokens of 15 and 16 blanks."""
    schema = json.dumps({"type": "object", "additionalProperties": {"type": "string"}})
    compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, schema, engine))
    for begin in ('{"a', '{"a":"', '{"a": "b' + " " * 9):
        matcher = compiled.matcher()
        ids = tokenizer.encode(begin, add_special_tokens=False).ids
        assert matcher.accept(ids) == len(ids)
        blanks = [token for token in mask(matcher) if texts[token] and not texts[token].strip(b" ")]
        assert max(len(texts[token]) for token in blanks) > 12
        for token in blanks:
            assert compiled.matcher().accept([*ids, token, token]) == len(ids) + 2
