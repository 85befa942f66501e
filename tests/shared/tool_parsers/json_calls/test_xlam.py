from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.xlam import XLAM

READ = tool_reader(XLAM)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"[{', '.join(objects)}]"


ANSWERS = [
    *common_answers(spell, ("```json",), rest="\nDone <tool> now."),
    Answer("a code block", f"```json\n{spell(WEATHER)}\n```", call(*WEATHER)),
    Answer(
        "a code block and text",
        f"So:\n```json\n{spell(TIME)}\n```\nDone.",
        content("So:\n") + call(*TIME) + content("Done."),
    ),
    Answer("another code block", '```json\n{"a": [1]}\n```', content('```json\n{"a": [1]}\n```')),
    Answer(
        "another function",
        '[{"name": "get_news", "arguments": {}}]',
        content('[{"name": "get_news", "arguments": {}}]'),
    ),
    Answer(
        "a code block of no language",
        f"So: ```\n{spell(WEATHER, TIME)}\n```",
        content("So: ") + call(*WEATHER) + call(*TIME),
    ),
    Answer("between tags", f"<tool_call>\n{spell(TIME)}\n</tool_call> b", call(*TIME) + content("b")),
    Answer("behind a marker", f"a [TOOL_CALLS] {spell(TIME)}", content("a ") + call(*TIME)),
    Answer("an empty list", " []\n", ()),
    Answer("an empty list in a block", "a ```json\n[]\n``` b", content("a b")),
    Answer("an empty list between tags", "<tool_call>[ ]</tool_call>", ()),
    Answer("nothing between tags", "a <tool_call>\n</tool_call> b", content("a b")),
    Answer("nothing in a block", "```json\n```", ()),
    Answer("nothing behind a marker", "a [TOOL_CALLS] ", content("a ")),
    Answer("a marker in a text", "a [TOOL_CALLS] b", content("a [TOOL_CALLS] b")),
    Answer("an empty list in a text", "[] is empty, so is [].", content("[] is empty, so is [].")),
    Answer("code", "```\na = [1]\n```", content("```\na = [1]\n```")),
    Answer("a link", "See [this](http://a.b).", content("See [this](http://a.b).")),
    Answer("JSON", '[{"name": 1}, [{"a": "name"}]]', content('[{"name": 1}, [{"a": "name"}]]')),
    Answer("no end", spell(WEATHER, TIME)[:-1], call(*WEATHER) + call(*TIME)),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, ("```json",), "a ``` b ```jso [ c ] ```j", len("```json")
)
