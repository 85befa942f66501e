import ast
import json
import random

import pytest
from recorded_answers import (
    Answer,
    call,
    check_answer,
    check_held_back,
    check_mutations,
    content,
    joined,
    pieces_of,
    tool_reader,
)

from blockyard.shared.output_parsing.parts import PartKind
from blockyard.shared.output_parsing.reader import OutputReader, read_all
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.python_calls.marked_calls import LFM2, OLMO3
from blockyard.shared.tool_parsers.python_calls.pythonic import LLAMA4_PYTHONIC, PYTHONIC

READ = tool_reader(PYTHONIC)
WEATHER = call("get_weather", '{"city": "Paris", "days": 3}')
ANSWERS = (
    Answer("none", "It is [sunny] < 5 and f(x=1).", content("It is [sunny] < 5 and f(x=1).")),
    Answer("one", "[get_weather(city='Paris', days=3)]", WEATHER),
    Answer("several", "[get_weather(city='Paris', days=3), get_time()]", WEATHER + call("get_time", "{}")),
    Answer(
        "nested",
        "[search(query='a \"b\" }', filter={'tags': ['x', ']'], 'n': (1, -2.5)}, exact=True, score=None)]",
        call(
            "search",
            '{"query": "a \\"b\\" }", "filter": {"tags": ["x", "]"], "n": [1, -2.5]}, "exact": true, "score": null}',
        ),
    ),
    Answer(
        "unicode and escapes",
        "[search(query='Zürich 東京 \\u00e9\\x41\\101\\U0001f600\\n\\'it\\'s\\'')]",
        call("search", '{"query": "Zürich 東京 éAA😀\\n\'it\'s\'"}'),
    ),
    Answer(
        "text around",
        "Let me look. [get_weather(city='Paris', days=3)] Done [now].",
        content("Let me look. ") + WEATHER + content(" Done [now]."),
    ),
    Answer("cut short", "[search(query='half", call("search", '{"query": "half')),
    Answer("cut in a number", "[get_weather(city='a', days=1", call("get_weather", '{"city": "a", "days": 1')),
    Answer("cut before the arguments", "[get_weath", content("[get_weath")),
    Answer("cut at the bracket", "[get_weather(", content("[get_weather(")),
    Answer("an unknown tool", "[open_door(id=1)]", content("[open_door(id=1)]")),
    Answer("malformed beginning", "[get_time(now is it)]", content("[get_time(now is it)]")),
    Answer(
        "malformed values",
        "[search(query=hello world, filter={tags 1}, exact=maybe)] b",
        call("search", '{"query": "hello world", "filter": {"tags 1"') + content("}, exact=maybe)] b"),
    ),
    Answer(
        "quotes without escapes",
        "[search(query='it's \"fine\"', filter={'tags': [\"a\"b\"]})]",
        call("search", '{"query": "it\'s \\"fine\\"", "filter": {"tags": ["a\\"b"]}}'),
    ),
    Answer(
        "brackets and commas in a text",
        "[search(query='f(a, [1]) = {2}', exact=False)]",
        call("search", '{"query": "f(a, [1]) = {2}", "exact": false}'),
    ),
    Answer(
        "long text between three quotes",
        '[search(query="""a\n"b", \'c\'\n""", exact=True)]',
        call("search", '{"query": "a\\n\\"b\\", \'c\'\\n", "exact": true}'),
    ),
    Answer(
        "words of JSON",
        '[search(query="a", exact=true, score=null, filter={"tags": []})]',
        call("search", '{"query": "a", "exact": true, "score": null, "filter": {"tags": []}}'),
    ),
    Answer(
        "numbers of Python",
        "[search(query=1_000, score=.5, filter=[0x1F, +7, 5., -0, 1e5, 12abc])]",
        call("search", '{"query": 1000, "score": 0.5, "filter": [31, 7, 5.0, -0, 1e5, "12abc"]}'),
    ),
    Answer(
        "lines, and commas at the end",
        "[\n  get_weather(\n    city = 'Paris',\n    days = 3,\n  ),\n  get_time( ),\n]",
        WEATHER + call("get_time", "{}"),
    ),
    Answer("without names", "[get_weather('Paris', 3)]", WEATHER),
    Answer("an object", '[get_weather(**{"city": "Paris", "days": 3})]', WEATHER),
    Answer(
        "raw text", "[search(query=r'a\\d\\'', exact=True)]", call("search", '{"query": "a\\\\d\\\\\'", "exact": true}')
    ),
    Answer(
        "escapes without a character of their own",
        "[search(query='\\a\\b\\f\\v\\t\\r\\0\\\n', exact=True)]",
        call("search", '{"query": "\\u0007\\b\\f\\u000b\\t\\r\\u0000", "exact": true}'),
    ),
    Answer("no escape", "[search(query='\\d\\xZZ\\u12')]", call("search", '{"query": "\\\\d\\\\xZZ\\\\u12"}')),
    Answer("halves of a character", '[search(query="\\ud83d\\ude00")]', call("search", '{"query": "\\ud83d\\ude00"}')),
    Answer("missing end", "[get_time()", call("get_time", "{}")),
    Answer("a number as a key", "[search(filter={1: 'a'})]", call("search", '{"filter": {"1": "a"}}')),
)

# what is no literal, and its JSON
EXPRESSIONS = {
    "{'a', 'b'}": '["a", "b"]',
    "{'a'}": '["a"]',
    "{1, (2, {3}), None}": "[1, [2, [3]], null]",
    "{('a', 1), 2}": '[["a", 1], 2]',
    "{'a': {1, 2}, 'b': {float('nan')}}": '{"a": [1, 2], "b": ["float(\'nan\')"]}',
    "{(1, 2): 3, 'k': {(4,): 5}}": '{"(1, 2)": 3, "k": {"(4,)": 5}}',
    "{1: 2, None: 3, True: 4, f(x, 1): 5}": '{"1": 2, "null": 3, "true": 4, "f(x, 1)": 5}',
    "{**a}": '{"**": "a"}',
    "{'a': 1, **f(x), **{'b': 2}}": '{"a": 1, "**": "f(x)", "**": {"b": 2}}',
    "'%s' % 1": '"%s\' % 1"',
    "['a'.join(['b', 'c']), {'d' + e: \"%s\" % f['g']}]": (
        "[\"a'.join(['b', 'c'])\", {\"d' + e\": \"%s\\\" % f['g']\"}]"
    ),
    "'a' if b else c": '"a\' if b else c"',
    "'it's + 'so' * 5. And it's'": "\"it's + 'so' * 5. And it's\"",
    "float('inf')": "\"float('inf')\"",
    "-float('inf')": "\"-float('inf')\"",
    "get_time()": '"get_time()"',
    "[date(2024, 1, 2), range(3)]": '["date(2024, 1, 2)", "range(3)"]',
    "dict(a='x, )', b=[1, 2])": "\"dict(a='x, )', b=[1, 2])\"",
    "f(it's)": '"f(it\'s)"',
    "1 + (2 * 3)": '"1 + (2 * 3)"',
    "[i for i in range(3)]": '["i for i in range(3)"]',
    "[1] + [2, 3]": "[1] + [2, 3]",
    "{'a': 1}.get('a', 2)": "{\"a\": 1}.get('a', 2)",
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize(
    ("tool_format", "before", "behind"),
    [
        (PYTHONIC, "[", "]"),
        (LLAMA4_PYTHONIC, "<|python_start|>[", "]<|python_end|>"),
        (LFM2, "<|tool_call_start|>[", "]<|tool_call_end|>"),
        (OLMO3, "<function_calls>\n", "\n</function_calls>"),
    ],
)
def test_calls_follow_what_is_no_literal(tool_format: ToolFormat, before: str, behind: str, expression: str) -> None:
    text = f"{before}search(query={expression}, exact=True), get_weather(city='Paris', days=3){behind}"
    expected = call("search", f'{{"query": {EXPRESSIONS[expression]}, "exact": true}}') + WEATHER
    check_answer(tool_reader(tool_format), Answer("", text, expected))


@pytest.mark.parametrize(
    ("damaged", "arguments"),
    [
        ("search(query=[1, 2)", '{"query": [1, 2'),
        ("search(query=)", '{"query": '),
        (
            "search('a', {}, True, 1.5, 'more')",
            '{"query": "a", "filter": {}, "exact": true, "score": 1.5, "4": "more"}',
        ),
    ],
)
def test_calls_follow_damaged_ones(damaged: str, arguments: str) -> None:
    check_answer(
        READ, Answer("", f"[{damaged}, get_weather(city='Paris', days=3)]", call("search", arguments) + WEATHER)
    )


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
@pytest.mark.parametrize("tool_format", [PYTHONIC, LLAMA4_PYTHONIC], ids=lambda one: one.name)
def test_answers_have_their_parts(tool_format: ToolFormat, answer: Answer) -> None:
    check_answer(tool_reader(tool_format), answer)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<|python_start|>[get_weather(city='Paris', days=3)]<|python_end|>", WEATHER),
        ("a <|python_start|>\n[get_time()]\n<|python_end|> b", content("a ") + call("get_time", "{}") + content(" b")),
        ("<|python_start|>print(1)<|python_end|>", content("<|python_start|>print(1)<|python_end|>")),
        ("<|python_start|>[1]", content("<|python_start|>[1]")),
        ("<|python_start|>[get_time()]", call("get_time", "{}")),
        ("[get_time()]<|python_end|>", call("get_time", "{}") + content("<|python_end|>")),
    ],
)
def test_llama_4_may_write_markers(text: str, parts: tuple) -> None:
    check_answer(tool_reader(LLAMA4_PYTHONIC), Answer("", text, parts))


@pytest.mark.parametrize("tool_format", [PYTHONIC, LLAMA4_PYTHONIC], ids=lambda one: one.name)
def test_damaged_answers(tool_format: ToolFormat) -> None:
    check_mutations(tool_reader(tool_format), ANSWERS, 500, tool_format.markers)


def test_little_is_held_back() -> None:
    check_held_back(READ, "a [get_weathe [[ search( b [get_tim", len("[get_weather("))
    check_held_back(tool_reader(LLAMA4_PYTHONIC), "a <|python_star [get_weathe [[ b", len("<|python_start|>"))


def test_without_tools_all_is_content() -> None:
    check_answer(tool_reader(PYTHONIC, ()), Answer("", "[get_time()]", content("[get_time()]")))


def test_arguments_come_while_they_are_written() -> None:
    reader = OutputReader(READ)
    reader.push("[search(query='a ")
    for _ in range(1000):
        assert "".join(part.text for part in reader.push("word ")) == "word "
    assert reader.push("'")[:1] == []  # it may be a part of the text
    assert "".join(part.text for part in reader.push(", exact=")) == '", "exact": '
    assert sum(part.kind == PartKind.CALL for part in reader.finish()) == 0


def random_value(draw: random.Random, depth: int = 0) -> object:
    match draw.randrange(8 if depth < 3 else 6):
        case 0:
            return draw.choice((True, False, None))
        case 1:
            return draw.randint(-(10**12), 10**12)
        case 2:
            return draw.uniform(-1e9, 1e9)
        case 6:
            return [random_value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        case 7:
            return {random_text(draw): random_value(draw, depth + 1) for _ in range(draw.randint(0, 3))}
        case _:
            return random_text(draw)


def random_text(draw: random.Random) -> str:
    return "".join(draw.choice("ab'\"\\,:)]}\n\t \x07é東😀") for _ in range(draw.randint(0, 9)))


def test_literals_are_read_as_python_reads_them() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        value = random_value(draw)
        source = repr(value)
        assert ast.literal_eval(source) == value
        parts = joined(READ, pieces_of(f"[search(query={source})]", draw))
        assert [part.kind for part in parts] == [PartKind.CALL, PartKind.ARGUMENTS, PartKind.CALL_END], source
        assert json.loads(parts[1].text) == {"query": value}, source


def test_long_and_deep_values_are_read() -> None:
    """Nesting needs no recursion; long words and numbers are not held back."""
    deep = "[" * 5000 + "]" * 5000
    assert read_all(READ, f"[search(query={deep})]")[1].text == f'{{"query": {deep}}}'
    number = "-1" + "0" * 5000
    assert read_all(READ, f"[search(query={number}, exact=True)]")[1].text == f'{{"query": {number}, "exact": true}}'
    word = "word " * 1000
    assert read_all(READ, f"[search(query={word}, exact=True)]")[1].text == f'{{"query": "{word}", "exact": true}}'
