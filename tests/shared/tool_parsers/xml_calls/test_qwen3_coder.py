from recorded_answers import Answer, call, check_answer, content, format_tests, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.tool_parsers.tools import Tool, ToolKind
from blockyard.shared.tool_parsers.xml_calls.families import QWEN3_CODER

READ = tool_reader(QWEN3_CODER)


def write(name: str, values: Values) -> str:
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


ONE = write("get_weather", {"city": "Paris", "days": "3"})
ANSWERS = (
    *tagged_answers("", write, "\n", "", "</parameter>"),
    Answer(
        "no line breaks",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days> 3 </parameter>"
        "</function></tool_call>",
        PARIS,
    ),
    Answer(
        "one line break on either side belongs to the tags",
        "<tool_call>\n<function=search>\n<parameter=query>\n\n  a\n\n</parameter>\n</function>\n</tool_call>",
        call("search", '{"query": "\\n  a\\n"}'),
    ),
    Answer(
        "a closing tag and its line are missing",
        ONE.replace("\n</parameter>", "", 1) + "\n" + ONE.replace("\n</parameter>", ""),
        PARIS + PARIS,
    ),
    Answer(
        "all that closes is missing",
        ONE.replace("\n</parameter>", "").replace("\n</function>", "") + " b",
        PARIS + content("b"),
    ),
    Answer(
        "tags in a value",
        write("search", {"query": "a </function> <parameter=exact> <parameter=no> <tool_call> b", "score": "1"}),
        call("search", '{"query": "a </function> <parameter=exact> <parameter=no> <tool_call> b", "score": 1}'),
    ),
    Answer(
        "cut behind a tag in a value",
        "<tool_call>\n<function=search>\n<parameter=query>\n</function>\nand",
        call("search", '{"query": "</function>\\nand'),
    ),
    Answer(
        "words of Python",
        write("search", {"exact": "True"}) + write("get_time", {"zone": "None", "other": "Nones"}),
        call("search", '{"exact": true}') + call("get_time", '{"zone": null, "other": "Nones"}'),
    ),
    Answer("the opening tag is missing", ONE.removeprefix("<tool_call>\n"), PARIS),
    Answer("the closing tag is missing", ONE.removesuffix("\n</tool_call>") + "\n" + ONE, PARIS + PARIS),
    Answer(
        "the end of the function is missing",
        ONE.replace("</function>\n", "") + " b",
        PARIS + content("b"),
    ),
    Answer(
        "no tool of this name and no opening tag",
        "<function=other>\n</function>",
        content("<function=other>\n</function>"),
    ),
    Answer(
        "cut between arguments",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</fun",
        call("get_weather", '{"city": "Paris"'),
    ),
    Answer("cut before the arguments", "<tool_call>\n<function=get_w", content("<tool_call>\n<function=get_w")),
    Answer(
        "malformed",
        'a <tool_call>\n<function=get_weather>\n{"city": 1}\n</function>\n</tool_call>',
        content('a <tool_call>\n<function=get_weather>\n{"city": 1}\n</function>\n</tool_call>'),
    ),
    Answer(
        "text between arguments",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\nand </function>\n</tool_call>",
        call("get_weather", '{"city": "Rome"}') + content("and </function>\n</tool_call>"),
    ),
    Answer(
        "a closing tag in JSON",
        write("search", {"filter": '{"tags": ["</parameter>"]}'}),
        call("search", '{"filter": {"tags": ["</parameter>"]}}'),
    ),
)

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ,
    ANSWERS,
    ("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>"),
    "a <tool <tool_cal> <functio b </tool_call> <tool_c",
    len("<tool_call>"),
)


def test_types_of_python() -> None:
    types = {"a": "float", "b": "int", "c": "bool", "d": "list", "e": "dict", "f": "str"}
    tool = Tool(ToolKind.FUNCTION, "f", {"properties": {name: {"type": kind} for name, kind in types.items()}})
    text = write("f", {"a": "1.5", "b": "2", "c": "True", "d": "[1]", "e": "{}", "f": "3"})
    expected = call("f", '{"a": 1.5, "b": 2, "c": true, "d": [1], "e": {}, "f": "3"}')
    check_answer(tool_reader(QWEN3_CODER, [tool]), Answer("", text, expected))
