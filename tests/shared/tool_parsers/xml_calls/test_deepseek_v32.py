import pytest
from recorded_answers import Answer, call, check_answer, check_held_back, check_mutations, content, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.output_parsing.parts import Part
from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.tool_parsers.xml_calls.families import DEEPSEEK_V4, DEEPSEEK_V32, DSML

READ = tool_reader(DEEPSEEK_V32)
BEGIN, END = f"<{DSML}function_calls>\n", f"\n</{DSML}function_calls>"
TAGS = (BEGIN, END, f'<{DSML}invoke name="', f"</{DSML}invoke>", f'<{DSML}parameter name="', f"</{DSML}parameter>")
TAGS += (DSML, ' string="true">', ' string="false">', '">')
TEXTS = ("city", "query", "zone", "no list", "a")  # arguments that hold strings


def write(name: str, values: Values) -> str:
    arguments = "".join(argument(key, value, key in TEXTS) for key, value in values.items())
    return f'<{DSML}invoke name="{name}">\n{arguments}</{DSML}invoke>'


def argument(key: str, value: str, is_string: bool) -> str:
    return f'<{DSML}parameter name="{key}" string="{str(is_string).lower()}">{value}</{DSML}parameter>\n'


ONE = write("get_weather", {"city": "Paris", "days": "3"})
ANSWERS = (
    *tagged_answers(BEGIN, write, "\n", END, "</｜DSML｜parameter>"),
    Answer(
        "the attribute decides",
        f'{BEGIN}<{DSML}invoke name="get_time">\n{argument("a", "[1]", True)}{argument("b", "[1]", False)}'
        f"{argument('c', 'true', True)}{argument('d', 'true', False)}</{DSML}invoke>{END}",
        call("get_time", '{"a": "[1]", "b": [1], "c": "true", "d": true}'),
    ),
    Answer(
        "without the attribute the schema decides",
        BEGIN + ONE.replace(' string="true"', "").replace(' string="false"', "") + END,
        PARIS,
    ),
    Answer(
        "a number as a string",
        f'{BEGIN}<{DSML}invoke name="get_weather">\n{argument("days", "3", True)}</{DSML}invoke>{END}',
        call("get_weather", '{"days": "3"}'),
    ),
    Answer(
        "no JSON although it says so",
        f'{BEGIN}<{DSML}invoke name="get_weather">\n{argument("city", "Paris", False)}</{DSML}invoke>{END}',
        call("get_weather", '{"city": "Paris"}'),
    ),
    Answer("the end of the block is missing", BEGIN + ONE, PARIS),
    Answer(
        "as the encoding script writes a call without arguments",
        f'I look.\n\n{BEGIN}<{DSML}invoke name="get_time">\n\n</{DSML}invoke>{END}',
        content("I look.\n\n") + call("get_time", "{}"),
    ),
    Answer("text behind", BEGIN + ONE + END + "\n\nb", PARIS + content("b")),
    Answer(
        "an unknown attribute",
        f'{BEGIN}<{DSML}invoke name="get_time">\n<{DSML}parameter name="a" type="b">c',
        call("get_time", "{}") + content(f'<{DSML}parameter name="a" type="b">c'),
    ),
    Answer(
        "malformed",
        f"{BEGIN}<{DSML}invoke get_time>\n</{DSML}invoke>{END}",
        content(f"{BEGIN}<{DSML}invoke get_time>\n</{DSML}invoke>{END}"),
    ),
)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
def test_answers_have_their_parts(answer: Answer) -> None:
    check_answer(READ, answer)


def test_the_later_version_has_another_block() -> None:
    for answer in ANSWERS:
        text = answer.text.replace("function_calls>", "tool_calls>")
        expected = [Part(part.kind, part.text.replace("function_calls>", "tool_calls>")) for part in answer.parts]
        assert read_all(tool_reader(DEEPSEEK_V4), text) == expected


def test_damaged_answers() -> None:
    check_mutations(READ, ANSWERS, 500, TAGS)


def test_little_is_held_back() -> None:
    check_held_back(READ, f"a <b <{DSML}tool_calls> <{DSML}functio", len(BEGIN))
