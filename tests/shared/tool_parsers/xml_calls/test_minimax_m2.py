from recorded_answers import Answer, call, content, format_tests, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.tool_parsers.xml_calls.families import MINIMAX_M2

READ = tool_reader(MINIMAX_M2)
BEGIN, END = "<minimax:tool_call>\n", "\n</minimax:tool_call>"
TAGS = (*MINIMAX_M2.markers, '<invoke name="', "</invoke>", '<parameter name="', "</parameter>", '">')


def write(name: str, values: Values) -> str:
    arguments = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="{name}">\n{arguments}</invoke>'


ONE = write("get_weather", {"city": "Paris", "days": "3"})
ANSWERS = (
    *tagged_answers(BEGIN, write, "\n", END, "</parameter>"),
    Answer("two blocks", BEGIN + ONE + END + "\n" + BEGIN + ONE + END, PARIS + PARIS),
    Answer("the end of the block is missing", BEGIN + ONE + "\n" + ONE, PARIS + PARIS),
    Answer(
        "text between calls ends the block",
        BEGIN + ONE + " and " + ONE + END,
        PARIS + content("and " + ONE + END),
    ),
    Answer(
        "line breaks belong to the value",
        BEGIN + write("search", {"query": "\na\n"}) + END,
        call("search", '{"query": "\\na\\n"}'),
    ),
    Answer(
        "a quote in a name",
        BEGIN + write("get_time", {'a"b': "c"}) + END,
        call("get_time", '{"a\\"b": "c"}'),
    ),
    Answer(
        "a list of objects",
        BEGIN + write("search", {"filter": '[{"a": "</parameter>"}, 2]'}) + END,
        call("search", '{"filter": [{"a": "</parameter>"}, 2]}'),
    ),
    Answer("an empty block", f"a {BEGIN}{END} b", content("a b")),
    Answer("without its block it is no call", ONE, content(ONE)),
    Answer(
        "malformed",
        BEGIN + '<invoke name="get_time>\n</invoke>' + END,
        content(BEGIN + '<invoke name="get_time>\n</invoke>' + END),
    ),
)

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, TAGS, "a <minimax:to <min> b </minimax:tool_call> <minimax:tool_c", len("<minimax:tool_call>")
)
