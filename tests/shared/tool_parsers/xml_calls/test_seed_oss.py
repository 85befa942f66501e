from recorded_answers import Answer, call, content, format_tests, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.tool_parsers.xml_calls.families import SEED_OSS

READ = tool_reader(SEED_OSS)
TAGS = (*SEED_OSS.markers, "<function=", "</function>", "<parameter=", "</parameter>", ">")


def write(name: str, values: Values) -> str:
    arguments = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>"


ONE = write("get_weather", {"city": "Paris", "days": "3"})
ANSWERS = (
    *tagged_answers("", write, "\n", "", "</parameter>"),
    Answer(
        "line breaks belong to the value",
        write("search", {"query": "\na\n", "exact": "\ntrue\n"}),
        call("search", '{"query": "\\na\\n", "exact": true}'),
    ),
    Answer(
        "words of Python",
        write("search", {"exact": "False", "score": "None"}),
        call("search", '{"exact": false, "score": "None"}'),
    ),
    Answer("the closing tag is missing", ONE.removesuffix("</seed:tool_call>") + "b", PARIS + content("b")),
    Answer(
        "two in one block",
        ONE.replace("</seed", "<function=get_time></function></seed"),
        PARIS + call("get_time", "{}"),
    ),
    Answer(
        "without its block it is no call",
        "<function=get_time>\n</function>",
        content("<function=get_time>\n</function>"),
    ),
    Answer(
        "cut in a name",
        "<seed:tool_call>\n<function=search>\n<parameter=que",
        call("search", "") + content("<parameter=que"),
    ),
    Answer(
        "malformed",
        "a <seed:tool_call>\n<function=>\n</function>\n</seed:tool_call>",
        content("a <seed:tool_call>\n<function=>\n</function>\n</seed:tool_call>"),
    ),
)

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, TAGS, "a <seed <seed:tool_cal> b </seed:tool_call> <seed:tool_c", len("<seed:tool_call>")
)
