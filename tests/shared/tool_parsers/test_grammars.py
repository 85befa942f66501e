"""What the grammar of each format allows, its reader reads back: calls of the given tools with valid arguments.

Random allowed tokens write answers for random tools, in a vocabulary whose tokenizer has the format's markers as
special tokens, and in one that spells them as text.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_walks import Writer
from hypothesis import settings
from json_schemas import random_schema, validate
from recorded_answers import TOOLS, tool_reader
from tokenizers import Tokenizer

from blockyard.shared.errors import RequestError
from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.interface import CompiledGrammar, GrammarError, MatcherError, Vocabulary
from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind
from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.tool_parsers.call_grammar import CallsSource, calls_source
from blockyard.shared.tool_parsers.channels.openai import OPENAI
from blockyard.shared.tool_parsers.grammar_rules import MAX_CALLS, GrammarRules, arguments_schema
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.registry import FORMATS
from blockyard.shared.tool_parsers.tools import CUSTOM_INPUT, TextGrammar, TextSyntax, Tool, ToolKind
from blockyard.shared.tool_parsers.xml_calls.longcat import LONGCAT, TAGGED

TOKENIZER = (Path(__file__).parents[3] / "shared/demo_model/tokenizer.json").read_text("utf-8")
EOS = (1, 3)
NAMES = ("get_weather", "get", "search-web", "x_1", "Zoom", "run")
ENOUGH = 20 if settings.get_current_profile_name() == "long" else 1  # answers that were read
NUM_SETS = 8 * ENOUGH  # of tools at most, for each format, vocabulary and kind of choice
TEXTS = ("", "Let me see: a < b, [1] and {2}.\n", "Zürich 東京 <tool <|tool [TOOL ")
SPECIAL = pytest.mark.parametrize("special", [False, True], ids=["markers as text", "special tokens"])
FREE = [one for one in FORMATS if one.openings is None or one.openings(TOOLS)]  # text before their calls is free
EACH_FREE = pytest.mark.parametrize("tool_format", FREE, ids=lambda one: one.name)
# whose calls do not begin like a JSON object
BESIDE_JSON = [one for one in FORMATS if not one.openings or not any(t[0] == "{" for t in one.openings(TOOLS))]
EACH = pytest.mark.parametrize("tool_format", FORMATS, ids=lambda one: one.name)
DAYS = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"], "additionalProperties": False}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@functools.cache
def engines_and_writer(markers: tuple[str, ...]) -> tuple[Engines, Writer]:
    """Grammar engines and a writer of the demo model's vocabulary with these special tokens."""
    tokenizer = engines_tokenizer(markers)
    vocabulary = Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), EOS)
    return Engines(vocabulary), Writer(vocabulary, markers)


@functools.cache
def engines_tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TOKENIZER)
    tokenizer.add_special_tokens(list(markers))
    return tokenizer


def random_tools(rng: random.Random) -> list[Tool]:
    return [random_tool(name, rng) for name in rng.sample(NAMES, rng.choice((1, 1, 2, 3)))]


def random_tool(name: str, rng: random.Random) -> Tool:
    if rng.random() < 0.15:
        text = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
        syntax = rng.choice((TextGrammar(TextSyntax.REGEX, '[a-z"/]{2,5}'), None))
        return Tool(ToolKind.CUSTOM, name, {**text, "additionalProperties": False}, grammar=syntax)
    schema = random_schema(rng.randrange(1000))
    if schema.get("type") != "object":
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        schema = {"type": "object", "properties": {"value": schema}, "required": ["value"], **definitions}
    return Tool(ToolKind.FUNCTION, name, schema)


def compiled(engines: Engines, found: CallsSource | None) -> CompiledGrammar:
    assert found is not None
    return engines.compile(Grammar(GrammarKind.LARK, found.source, GrammarEngine.GUIDANCE, markers=found.markers))


@functools.cache
def is_takeable(arguments: str) -> bool:
    """False for schemas that the engine does not take by themselves either, and those with an impossible argument."""
    engines, _ = engines_and_writer(())
    schema = json.loads(arguments)
    whole = {key: value for key, value in schema.items() if key in ("type", "$defs")}
    alone = [{**whole, "properties": {name: part}, "required": [name]} for name, part in schema["properties"].items()]
    try:
        for one in (schema, *alone):
            engines.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(one), GrammarEngine.GUIDANCE))
    except GrammarError:
        return False
    return True


def written(tool_format: ToolFormat, special: bool, forced: bool, parallel: bool, seed: int, begin: str) -> Any:
    """Some tools, and the parts of an answer that may call them. None if the answer did not end."""
    rng = random.Random(f"{tool_format.name} {special} {forced} {parallel} {seed}")
    engines, writer = engines_and_writer(tool_format.markers if special else ())
    tools = [tool for tool in random_tools(rng) if is_takeable(json.dumps(arguments_schema(tool)))]
    if not tools:
        return None
    if begin and tool_format.openings is not None:
        begin += tool_format.openings(tools)[0]
    elif begin:
        begin += tool_format.markers[0]
    try:
        grammar = compiled(engines, calls_source(tool_format, tools, parallel, forced))
    except GrammarError as e:  # in formats whose arguments stand alone, of a part of a schema that has no values
        assert "Unsatisfiable" in str(e), e
        return None
    except RequestError as e:  # the schema leaves names open
        assert "no arguments that are valid" in str(e), e
        return None
    try:
        text = writer.write(grammar, rng, 1000, begin)
    except MatcherError as e:  # an ambiguous schema
        assert "took" in str(e) or "too complex" in str(e) or "limit" in str(e), e
        return None
    return None if text is None else (tools, text, read_all(tool_reader(tool_format, tools), text))


def check_calls(tools: list[Tool], text: str, parts: list[Part], parallel: bool) -> None:
    """Each call is whole, of one of the tools, and its arguments are valid."""
    by_name = {tool.name: tool for tool in tools}
    name, arguments, num_calls, is_open = "", "", 0, False
    for part in parts:
        if part.kind == PartKind.CALL:
            name, arguments, is_open = part.text, "", True
            num_calls += 1
        elif part.kind == PartKind.ARGUMENTS:
            arguments += part.text
        elif part.kind == PartKind.CALL_END:
            is_open = False
            try:
                validate(arguments, arguments_schema(by_name[name]))
            except ValueError as e:
                pytest.fail(f"{arguments!r} of {name} in {text!r}: {e}")
    assert not is_open and 1 <= num_calls <= (MAX_CALLS if parallel else 1), text


@EACH
@SPECIAL
@pytest.mark.parametrize("parallel", [False, True], ids=["one", "parallel"])
def test_forced_calls_are_read_back(tool_format: ToolFormat, special: bool, parallel: bool) -> None:
    num_read = 0
    for seed in range(NUM_SETS):
        found = written(tool_format, special, True, parallel, seed, "")
        if found is not None:
            tools, text, parts = found
            check_calls(tools, text, parts, parallel)
            allowed = (PartKind.REASONING,) if tool_format.reads_reasoning else ()
            others = [part for part in parts if part.kind in (PartKind.CONTENT, PartKind.REASONING)]
            assert not any(part.text.strip() for part in others if part.kind not in allowed), (text, parts)
            num_read += 1
            if num_read == ENOUGH:
                break
    assert num_read


@EACH_FREE
@SPECIAL
def test_text_may_come_before_calls_that_are_not_forced(tool_format: ToolFormat, special: bool) -> None:
    num_read = 0
    for seed in range(NUM_SETS):
        before = TEXTS[seed % len(TEXTS)] + " "
        found = written(tool_format, special, False, True, seed, before)
        if found is not None:
            tools, text, parts = found
            check_calls(tools, text, parts, True)
            assert "".join(part.text for part in parts if part.kind == PartKind.CONTENT).strip() == before.strip(), text
            num_read += 1
            if num_read == max(ENOUGH, len(TEXTS)):
                break
    assert num_read


@EACH_FREE
@SPECIAL
def test_text_without_calls_is_free(tool_format: ToolFormat, special: bool) -> None:
    engines, writer = engines_and_writer(tool_format.markers if special else ())
    tools = [Tool(ToolKind.FUNCTION, "get_weather", CITY)]
    grammar = compiled(engines, calls_source(tool_format, tools, True, False))
    rng = random.Random(tool_format.name)
    for begin in (*TEXTS, "Hello"):
        text = writer.write(grammar, rng, 30, begin)
        if text is not None and not any(
            part.kind == PartKind.CALL for part in read_all(tool_reader(tool_format), text)
        ):
            assert text.startswith(begin)
            break
    else:
        pytest.fail("no text without calls ended")
    forced = compiled(engines, calls_source(tool_format, tools, True, True))
    assert grammar.matcher().is_complete() and not forced.matcher().is_complete()


@pytest.mark.parametrize("tool_format", BESIDE_JSON, ids=lambda one: one.name)
@SPECIAL
def test_an_answer_is_calls_or_as_another_field_says(tool_format: ToolFormat, special: bool) -> None:
    engines, writer = engines_and_writer(tool_format.markers if special else ())
    tools = [Tool(ToolKind.FUNCTION, "get_weather", DAYS)]
    schema = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
    grammar = compiled(engines, calls_source(tool_format, tools, True, False, lambda rules: rules.json(schema)))
    forced = compiled(engines, calls_source(tool_format, tools, False, True))
    call = next(text for seed in range(20) if (text := writer.write(forced, random.Random(seed), 400)) is not None)
    before = "<|channel|>final<|message|>" if tool_format is OPENAI else ""
    tokenizer = engines_tokenizer(tool_format.markers if special else ())
    for text, is_whole in ((call, True), (before + '{"day": 3}', True), (before + '{"day": "', False), ("Hi", False)):
        ids, matcher = tokenizer.encode(text, add_special_tokens=False).ids, grammar.matcher()
        assert (matcher.accept(ids) == len(ids) and matcher.is_complete()) == is_whole, text


@SPECIAL
def test_answers_of_harmony_that_may_call(special: bool) -> None:
    engines, _ = engines_and_writer(OPENAI.markers if special else ())
    tokenizer = engines_tokenizer(OPENAI.markers if special else ())
    grammar = compiled(engines, calls_source(OPENAI, [Tool(ToolKind.FUNCTION, "get_weather", CITY)], True, False))
    thinks = "<|channel|>analysis<|message|>Is a < b?<|end|><|start|>assistant"
    plan = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    paris, wrong = '{"city": "Paris"}', '{"city": 3'
    heads = [
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|message|>",
    ]
    good = [f"{before}{head}{paris}" for before in ("", thinks, thinks + plan) for head in heads]
    good += [f"{before}<|channel|>final<|message|>Fine." for before in ("", thinks)]
    bad = [f"{head}{wrong}" for head in heads] + ["<|channel|>commentary to=functions.other", "Fine."]
    for text in good + bad:
        ids, matcher = tokenizer.encode(text, add_special_tokens=False).ids, grammar.matcher()
        assert (matcher.accept(ids) == len(ids) and matcher.is_complete()) == (text in good), text


@SPECIAL
def test_forced_calls_of_harmony_may_follow_reasoning(special: bool) -> None:
    engines, writer = engines_and_writer(OPENAI.markers if special else ())
    tools = [Tool(ToolKind.FUNCTION, "get_weather", CITY)]
    grammar = compiled(engines, calls_source(OPENAI, tools, True, True))
    thinks = "<|channel|>analysis<|message|>Is a < b?<|end|><|start|>assistant"
    calls = " to=functions.get_weather<|channel|>commentary json<|message|>"
    text = writer.write(grammar, random.Random(3), 400, thinks + calls)
    assert text is not None
    parts = read_all(tool_reader(OPENAI, tools), text)
    assert parts[:2] == [Part(PartKind.REASONING, "Is a < b?"), Part(PartKind.CALL, "get_weather")]
    check_calls(tools, text, parts, False)


def test_openings_are_found_at_each_place_of_a_text() -> None:
    """For each short text of few characters: it is allowed unless it has an opening, which calls alone may follow."""
    engines, _ = engines_and_writer(())
    openings = ["<ab>", "[x", "!"]
    rules = GrammarRules()
    source = rules.source(f'{rules.text_without(openings)} ("<ab>" "." | "[x" "." | "!" ".")?')
    grammar = engines.compile(Grammar(GrammarKind.LARK, source, GrammarEngine.GUIDANCE))
    tokenizer = Tokenizer.from_str(TOKENIZER)
    ids = {char: tokenizer.token_to_id(char) for char in "<ab>[x!."}
    rng = random.Random(1)
    for _ in range(4000):
        text = "".join(rng.choice("<ab>[x!.") for _ in range(rng.randint(1, 9)))
        first = min((text.find(one) + len(one) for one in openings if one in text), default=-1)
        matcher = grammar.matcher()
        num = matcher.accept([ids[char] for char in text])
        if first >= 0:
            is_call = text[first:].startswith(".")
            assert num <= first + is_call, text
            assert matcher.is_complete() <= (num == first + 1), text
        elif not any(part in text for part in ("<ab<", "<ab[", "[<", "[[", "[!", "<ab!")):
            assert num == len(text), text
            assert matcher.is_complete() == (not text.endswith(("<ab", "["))), text


@pytest.mark.parametrize("openings", [["<a<b"], ["<a", "{<"]])
def test_openings_that_the_lexer_would_miss_are_refused(openings: list[str]) -> None:
    with pytest.raises(ValueError, match="first character"):
        GrammarRules().text_without(openings)


@EACH
def test_an_answer_with_several_calls_may_end_behind_the_first(tool_format: ToolFormat) -> None:
    engines, writer = engines_and_writer(tool_format.markers)
    tools = [Tool(ToolKind.FUNCTION, "get_weather", DAYS)]
    one = writer.write(compiled(engines, calls_source(tool_format, tools, False, True)), random.Random(3), 1000)
    assert one is not None
    matcher = compiled(engines, calls_source(tool_format, tools, True, True)).matcher()
    for token in engines_tokenizer(tool_format.markers).encode(one, add_special_tokens=False).ids:
        assert matcher.accept([token]) == 1, one
    words = np.zeros(
        Vocabulary("", engines_tokenizer(tool_format.markers).get_vocab_size(), EOS).num_mask_words, np.int32
    )
    matcher.fill(words)
    assert np.unpackbits(words.view(np.uint8), bitorder="little")[EOS[0]]


@SPECIAL
def test_longcat_writes_the_object_where_tags_cannot_hold_the_schema(special: bool) -> None:
    engines, writer = engines_and_writer(LONGCAT.markers if special else ())
    patterns = {f"^{letter}": {"type": "integer"} for letter in "abcdef"}
    schema = {"type": "object", "properties": {"now": {"type": "boolean"}}, "patternProperties": patterns}
    tools = [Tool(ToolKind.FUNCTION, "f", {**schema, "additionalProperties": False})]
    with pytest.raises(RequestError):
        TAGGED.write_grammar(GrammarRules(), tools, False)
    for seed in range(3):
        text = writer.write(compiled(engines, calls_source(LONGCAT, tools, True, True)), random.Random(seed), 1000)
        assert text is not None and '{"name": "f"' in text and "longcat_arg" not in text
