from recorded_answers import Answer, call, content, format_tests, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.tool_parsers.xml_calls.families import MIMO

READ = tool_reader(MIMO)
TAGS = (*MIMO.markers, "<function=", "</function>", "<parameter=", "</parameter>", ">")


def write(name: str, values: Values) -> str:
    arguments = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


ONE = write("get_weather", {"city": "Paris", "days": "3"})
ANSWERS = (
    *tagged_answers("", write, "", "", "</parameter>"),
    Answer(
        "values are preserved with their newlines and spaces",
        write("search", {"query": "\n  a \n\n"}),
        call("search", '{"query": "\\n  a \\n\\n"}'),
    ),
    Answer("behind reasoning", "\n\n" + ONE, content("\n\n") + PARIS),
    Answer("the closing tag is missing", ONE.removesuffix("</tool_call>"), PARIS),
    Answer(
        "malformed",
        '<tool_call>\n{"name": "get_time"}\n</tool_call>',
        content('<tool_call>\n{"name": "get_time"}\n</tool_call>'),
    ),
)

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, TAGS, "a <tool <tool_cal> b </tool_call> <tool_c", len("<tool_call>")
)
