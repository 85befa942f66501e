from recorded_answers import Answer, call, content, format_tests, tool_reader
from tagged_answers import PARIS, Values, tagged_answers

from blockyard.shared.tool_parsers.xml_calls.step3 import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    STEP3,
)

READ = tool_reader(STEP3)
BEGIN, END = f"{CALLS_BEGIN}\n", f"\n{CALLS_END}"
TAGS = (*STEP3.markers, '<steptml:invoke name="', "</steptml:invoke>", '<steptml:parameter name="', '">')
TAGS += ("</steptml:parameter>",)


def write(name: str, values: Values) -> str:
    arguments = "".join(f'<steptml:parameter name="{key}">{text}</steptml:parameter>' for key, text in values.items())
    invoke = f'<steptml:invoke name="{name}">{arguments}</steptml:invoke>'
    return f"{CALL_BEGIN}\nfunction{SEPARATOR}{invoke}{CALL_END}"


ONE = write("get_weather", {"city": "Paris", "days": "3"})
ANSWERS = (
    *tagged_answers(BEGIN, write, "\n", END, "</steptml:parameter>"),
    Answer(
        "line breaks between tags",
        f'{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}\n<steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n'
        f'<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke>{CALL_END}{CALLS_END}',
        PARIS,
    ),
    Answer("without the tokens around all calls", ONE + "\n" + ONE, PARIS + PARIS),
    Answer("two blocks", BEGIN + ONE + END + BEGIN + ONE + END, PARIS + PARIS),
    Answer("the tokens behind a call are missing", BEGIN + ONE.removesuffix(CALL_END) + " b", PARIS + content("b")),
    Answer(
        "a value with tags",
        BEGIN + write("search", {"query": "if a < b: <b>\n"}) + END,
        call("search", '{"query": "if a < b: <b>\\n"}'),
    ),
    Answer(
        "no function",
        f"{BEGIN}{CALL_BEGIN}thought{SEPARATOR}hm{CALL_END}{END}",
        content(f"{BEGIN}{CALL_BEGIN}thought{SEPARATOR}hm{CALL_END}{END}"),
    ),
    Answer(
        "malformed",
        f"a {BEGIN}{CALL_BEGIN}function{SEPARATOR}<steptml:invoke name=>{CALL_END}{END}",
        content(f"a {BEGIN}{CALL_BEGIN}function{SEPARATOR}<steptml:invoke name=>{CALL_END}{END}"),
    ),
)

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, TAGS, f"a < b <tool {CALL_END} c {CALL_BEGIN[:-3]} d {SEPARATOR}", len(CALLS_BEGIN)
)
