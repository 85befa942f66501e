import pytest
from recorded_answers import Answer, call, check_answer, check_held_back, check_mutations, content, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.tool_parsers.xml_calls.families import GLM45, GLM47

READ = tool_reader(GLM45)


def write(name: str, values: Values) -> str:
    arguments = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{arguments}</tool_call>"


def in_one_line(name: str, values: Values) -> str:
    arguments = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
    return f"<tool_call>{name}{arguments}</tool_call>"


ANSWERS = (
    *tagged_answers("", write, "\n", "", "</arg_value>"),
    Answer("spaces around the name", "<tool_call> get_time \n </tool_call>", call("get_time", "{}")),
    Answer(
        "spaces between tags",
        "<tool_call>ls <arg_key>path</arg_key> <arg_value> a b </arg_value> </tool_call>",
        call("ls", '{"path": " a b "}'),
    ),
    Answer(
        "a value of several lines",
        write("search", {"query": "\na\n\nb\n"}),
        call("search", '{"query": "\\na\\n\\nb\\n"}'),
    ),
    Answer(
        "tags of another kind in a value",
        write("search", {"query": "<arg_key>a</arg_key><tool_call>"}),
        call("search", '{"query": "<arg_key>a</arg_key><tool_call>"}'),
    ),
    Answer(
        "the end of the call is missing",
        write("get_weather", {"city": "Paris", "days": "3"}).removesuffix("</tool_call>")
        + "a "
        + write("get_time", {}),
        PARIS + content("a ") + call("get_time", "{}"),
    ),
    Answer(
        "cut between key and value",
        "<tool_call>search\n<arg_key>query</arg_key>\n",
        call("search", "") + content("<arg_key>query</arg_key>\n"),
    ),
    Answer(
        "an object, as the template of Laguna asks for",
        'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>\n',
        content("I look.\n") + call("search", '{"query": "a"}'),
    ),
    Answer("cut in the name", "<tool_call>sear", content("<tool_call>sear")),
    Answer(
        "malformed",
        '<tool_call>\n{"tool": "get_time"}\n</tool_call> b',
        content('<tool_call>\n{"tool": "get_time"}\n</tool_call> b'),
    ),
)
ANSWERS_IN_ONE_LINE = tagged_answers("", in_one_line, "", "", "</arg_value>")


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
def test_answers_have_their_parts(answer: Answer) -> None:
    check_answer(READ, answer)


@pytest.mark.parametrize("answer", ANSWERS_IN_ONE_LINE, ids=lambda a: a.name)
def test_answers_of_the_later_form_have_their_parts(answer: Answer) -> None:
    check_answer(tool_reader(GLM47), answer)


def test_both_forms_are_read_alike() -> None:
    for answer in (*ANSWERS, *ANSWERS_IN_ONE_LINE):
        assert read_all(READ, answer.text) == read_all(tool_reader(GLM47), answer.text)


def test_damaged_answers() -> None:
    check_mutations(READ, (*ANSWERS, *ANSWERS_IN_ONE_LINE), 500, GLM45.markers)


def test_little_is_held_back() -> None:
    check_held_back(READ, "a <tool <tool_cal> b </tool_call> <tool_c", len("<tool_call>"))
