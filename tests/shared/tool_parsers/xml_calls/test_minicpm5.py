from recorded_answers import Answer, call, content, format_tests, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.tool_parsers.xml_calls.families import MINICPM5

READ = tool_reader(MINICPM5)
TAGS = ('<function name="', "</function>", '<param name="', "</param>", '">', "<![CDATA[", "]]>")


def write(name: str, values: Values) -> str:
    arguments = "".join(f'<param name="{key}">{_value(key, value)}</param>' for key, value in values.items())
    return f'<function name="{name}">{arguments}</function>'


def _value(key: str, value: str) -> str:
    is_string = key not in ("days", "filter", "exact", "score")
    return f"<![CDATA[{value}]]>" if is_string and any(char in value for char in "<&\n") else value


ANSWERS = (
    *tagged_answers("", write, "\n", "", "</param>"),
    Answer(
        "line breaks between tags",
        '<function name="get_weather">\n  <param name="city">Paris</param>\n  <param name="days">3</param>\n'
        "</function>",
        PARIS,
    ),
    Answer(
        "a closing tag in CDATA",
        '<function name="search"><param name="query"><![CDATA[</param>]] >\n]]></param></function>',
        call("search", '{"query": "</param>]] >\\n"}'),
    ),
    Answer(
        "JSON in CDATA",
        '<function name="search"><param name="filter"><![CDATA[\n{"tags": ["<"]}\n]]></param></function>',
        call("search", '{"filter": {"tags": ["<"]}}'),
    ),
    Answer(
        "no entities",
        '<function name="search"><param name="query">a &lt; b</param></function>',
        call("search", '{"query": "a &lt; b"}'),
    ),
    Answer(
        "spaces around a call",
        "\n " + write("get_time", {}) + "\n b",
        content("\n ") + call("get_time", "{}") + content("b"),
    ),
    Answer("cut in a name", '<function name="get_wea', content('<function name="get_wea')),
    Answer(
        "cut in CDATA",
        '<function name="search"><param name="query"><![CDATA[a]',
        call("search", '{"query": "a]'),
    ),
    Answer("malformed", '<function name="get_time"/> b', content('<function name="get_time"/> b')),
)

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, TAGS, "a <b> <func <function b <function name= c <function nam", len('<function name="')
)
