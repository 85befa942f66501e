from call_answers import WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.ernie45 import ERNIE45

READ = tool_reader(ERNIE45)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in objects)


ANSWERS = [
    *common_answers(spell, ("<tool_call>", "</tool_call>", "<response>", "</response>")),
    Answer("a response", "\n\n<response>\nIt is sunny.\n</response>\n", content("It is sunny.")),
    Answer(
        "a response and a call",
        "\n<response>\nI look.\n</response>\n\n\n" + spell(WEATHER),
        content("I look.") + call(*WEATHER),
    ),
    Answer("a response without an end", "<response>\nIt is\nsunny", content("It is\nsunny")),
    Answer("no response", "Say <response> and </response>.", content("Say <response> and </response>.")),
    Answer(
        "a response that names its markers",
        "<response>Say <response> now</response> or </response>",
        content("Say <response> nowor </response>"),
    ),
    Answer("a call first", spell(WEATHER) + "<response>", call(*WEATHER) + content("<response>")),
    Answer("no end", spell(WEATHER)[: -len("</tool_call>\n")], call(*WEATHER)),
    Answer("malformed", "<tool_call>\nget_time\n</tool_call>", content("<tool_call>\nget_time\n</tool_call>")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ,
    ANSWERS,
    ("<tool_call>", "</tool_call>", "<response>", "</response>"),
    "a <tool <tool_cal> b </tool_call> <tool_c",
    len("<tool_call>"),
)
