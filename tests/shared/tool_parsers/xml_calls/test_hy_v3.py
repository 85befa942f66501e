import pytest
from recorded_answers import Answer, call, check_answer, check_held_back, check_mutations, content, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.tool_parsers.xml_calls.hy_v3 import HY_V3

READ = tool_reader(HY_V3)
BEGIN, END = "<tool_calls:opensource>\n", "\n</tool_calls:opensource>"
TAGS = HY_V3.markers


def write(name: str, values: Values) -> str:
    arguments = "".join(
        f"<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n"
        for key, value in values.items()
    )
    return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{arguments}</tool_call:opensource>"


ONE = write("get_weather", {"city": "Paris", "days": "3"})
ANSWERS = (
    *tagged_answers(BEGIN, write, "\n", END, "</arg_value:opensource>"),
    Answer(
        "key and value in one line",
        BEGIN + ONE.replace("</arg_key:opensource>\n", "</arg_key:opensource>") + END,
        PARIS,
    ),
    Answer("the end of the block is missing", BEGIN + ONE + "\nb", PARIS + content("b")),
    Answer(
        "line breaks belong to the value",
        BEGIN + write("search", {"query": "\na\n"}) + END,
        call("search", '{"query": "\\na\\n"}'),
    ),
    Answer(
        "tags of the preview in a value",
        BEGIN + write("search", {"query": "</arg_value></tool_call>"}) + END,
        call("search", '{"query": "</arg_value></tool_call>"}'),
    ),
    Answer(
        "malformed",
        BEGIN + "<tool_call:opensource>get_time\n</tool_call:opensource>" + END,
        content(BEGIN + "<tool_call:opensource>get_time\n</tool_call:opensource>" + END),
    ),
)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
def test_answers_have_their_parts(answer: Answer) -> None:
    check_answer(READ, answer)


def test_the_preview_has_shorter_tags() -> None:
    for answer in ANSWERS[:-2]:
        text = answer.text.replace(":opensource", "")
        check_answer(READ, Answer(answer.name, text, answer.parts))
    assert read_all(READ, "<tool_calls> b") == list(content("<tool_calls> b"))


def test_damaged_answers() -> None:
    check_mutations(READ, ANSWERS, 500, TAGS)


def test_little_is_held_back() -> None:
    check_held_back(READ, "a <tool <tool_calls:op> b </tool_calls:opensource> <tool_c", len(BEGIN))
