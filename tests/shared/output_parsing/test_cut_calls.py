"""Answers that end in a call: its beginning is no content, and no other text is lost."""

import random

import pytest
from recorded_answers import TOOLS, pieces_of

from blockyard.shared.messages import FinishReason, TextDelta
from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.ring_client.choice_reader import joined, open_reader
from blockyard.shared.ring_client.request_fields.output_format import (
    OutputFormats,
    cut_calls,
    read_output_form,
    shown_special,
)
from blockyard.shared.ring_client.request_fields.tools import ToolMode, ToolUse
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.registry import FORMATS
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

# two calls as each format writes them, or one where an answer has one
CALLS = {
    "openai": '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "a"}',
    "gemma4": '<|tool_call>call:search{query:<|"|>a<|"|>}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
    "functiongemma": "<start_function_call>call:search{query:<escape>a<escape>}<end_function_call>"
    "<start_function_call>call:get_time{}<end_function_call>",
    "lfm2": '<|tool_call_start|>[search(query="a", exact=True), get_time()]<|tool_call_end|>',
    "olmo3": '<function_calls>\nsearch(query="a", exact=True)\nget_time()\n</function_calls>',
    "llama4_pythonic": "<|python_start|>[search(query='a', exact=True), get_time()]<|python_end|>",
    "pythonic": "[search(query='a', exact=True), get_time()]",
    "apertus": '<|tools_prefix|>[{"search": {"query": "a"}}, {"get_time": {}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "search", "parameters": '
    '{"query": "a"}},\n    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
    "gigachat3": '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "search", "arguments": {"query": "a"}}',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n'
    '<｜DSML｜parameter name="query" string="true">a</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "hy_v3": "<tool_calls:opensource>\n<tool_call:opensource>search<tool_sep:opensource>\n<arg_key:opensource>query"
    "</arg_key:opensource>\n<arg_value:opensource>a</arg_value:opensource>\n</tool_call:opensource>\n"
    "<tool_call:opensource>get_time<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    "glm47": "<tool_call>search<arg_key>query</arg_key><arg_value>a</arg_value></tool_call>"
    "<tool_call>get_time</tool_call>",
    "glm45": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n</tool_call>\n"
    "<tool_call>get_time\n</tool_call>",
    "minicpm5": '<function name="search"><param name="query">a</param></function><function name="get_time"></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">a</parameter>\n</invoke>\n'
    '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=search>\n<parameter=query>a</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=get_time>\n</function>\n</seed:tool_call>",
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>\nfunction<｜tool_sep｜><steptml:invoke name="search">'
    '<steptml:parameter name="query">a</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>\n'
    'function<｜tool_sep｜><steptml:invoke name="get_time"></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
    "mimo": "<tool_call>\n<function=search>\n<parameter=query>a</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "search", "arguments": {"query": "a"}}, {"name": "get_time", "arguments": {}}]',
    "granite-20b-fc": '<function_call> {"name": "search", "arguments": {"query": "a"}}'
    '<function_call> {"name": "get_time", "arguments": {}}',
    "internlm": '<|action_start|><|plugin|>\n{"name": "search", "parameters": {"query": "a"}}<|action_end|>'
    '<|action_start|><|plugin|>\n{"name": "get_time", "parameters": {}}<|action_end|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
    '{"query": "a"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "a"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    '{"query": "a"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": '{"name": "search", "parameters": {"query": "a"}}; {"name": "get_time", "parameters": {}}',
    "mistral": '[TOOL_CALLS]search[ARGS]{"query": "a"}[TOOL_CALLS]get_time[ARGS]{}',
    "xlam": '[{"name": "search", "arguments": {"query": "a"}}, {"name": "get_time", "arguments": {}}]',
}
CALLS["deepseek_v4"] = CALLS["deepseek_v32"].replace("function_calls", "tool_calls")
for _name, _before, _after in (
    ("hermes", "<tool_call>\n", "\n</tool_call>"),
    ("ernie45", "<tool_call>\n", "\n</tool_call>"),
    ("longcat", "<longcat_tool_call>\n", "\n</longcat_tool_call>"),
):
    CALLS[_name] = "\n".join(f"{_before}{one}{_after}" for one in CALLS["xlam"][1:-1].split(", {"))
    CALLS[_name] = CALLS[_name].replace('"name": "get_time"', '{"name": "get_time"')
CALLS["minimax"] = f"<tool_calls>\n{CALLS['xlam'][1:-1].replace(', {', chr(10) + '{')}\n</tool_calls>"
CALLS["hunyuan_a13b"] = CALLS["jamba"] = f"<tool_calls>{CALLS['xlam']}</tool_calls>"
CALLS["phi4_mini_json"] = f"functools{CALLS['xlam']}"
TEXT = "It is 2 < 3, [1] and {so}.\n"
EACH = pytest.mark.parametrize("tool_format", FORMATS, ids=lambda one: one.name)


def use(forced: bool) -> ToolUse:
    return ToolUse(ToolMode.REQUIRED if forced else ToolMode.AUTO, list(TOOLS), b"")


def read(tool_format: ToolFormat | None, asked: ToolUse, pieces: list[str]) -> list[Part]:
    formats = OutputFormats(tool_format)
    form = read_output_form(asked, formats)
    assert form is not None
    one = open_reader(form, asked, formats, None, True, lambda e: pytest.fail(str(e)))
    pieces = pieces or [""]
    deltas = [TextDelta("r", 0, 0, i, [i], piece) for i, piece in enumerate(pieces[:-1])]
    deltas.append(TextDelta("r", 0, 0, len(pieces), [], pieces[-1], FinishReason.LENGTH))
    return joined([Part(part.kind, part.text) for delta in deltas for part in one.push(delta)])


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == PartKind.CONTENT)


def is_whole(parts: list[Part]) -> bool:
    return parts[-1:] == [Part(PartKind.CALL_END)]


@EACH
@pytest.mark.parametrize("forced", [False, True], ids=["auto", "forced"])
def test_an_answer_that_ends_in_a_call_shows_nothing_of_its_beginning(tool_format: ToolFormat, forced: bool) -> None:
    """At every place, the same in one piece and in several. What is shown is a part of an opening at most."""
    draw, asked = random.Random(tool_format.name), use(forced)
    before = "" if forced or tool_format.reads_reasoning else TEXT
    form = read_output_form(asked, OutputFormats(tool_format))
    openings = cut_calls(form, asked, OutputFormats(tool_format)).openings if form is not None else ()
    whole = before + CALLS[tool_format.name]
    num_cut = 0
    for at in range(len(before), len(whole) + 1):
        text = whole[:at]
        parts = read(tool_format, asked, [text])
        assert read(tool_format, asked, list(pieces_of(text, draw))) == parts, text
        shown = content_of(parts).removeprefix(before.rstrip()).strip()
        calls = [part.text for part in parts if part.kind == PartKind.CALL]
        assert not shown or (not forced and not calls and _is_part(shown, openings)), (text, parts)
        num_cut += bool(calls) and not is_whole(parts)
    assert is_whole(parts) and calls == ["search", "get_time"][: len(calls)] and num_cut > 5


def _is_part(shown: str, openings: tuple[str, ...]) -> bool:
    dense = "".join(shown.split())
    return any(one.startswith(dense) and one != dense for one in openings)


@EACH
def test_text_that_only_might_have_been_an_opening_is_kept(tool_format: ToolFormat) -> None:
    asked, draw = use(False), random.Random(1)
    form = read_output_form(asked, OutputFormats(tool_format))
    assert form is not None
    marks = [*shown_special(form, OutputFormats(tool_format))]
    marks += tool_format.openings(TOOLS) if tool_format.openings is not None else []
    for mark in marks:
        for at in range(1, len(mark)):
            text = TEXT + mark[:at]
            if any(one in text for one in marks):  # a shorter one
                continue
            assert content_of(read(tool_format, asked, pieces_of(text, draw))) == text


@EACH
def test_text_behind_an_opening_that_no_call_begins_with_is_kept(tool_format: ToolFormat) -> None:
    openings = tool_format.openings(TOOLS) if tool_format.openings is not None else ()
    opening = (*openings, *tool_format.markers)[0]
    text = f"{TEXT}Models write {opening} and then they go on, as this one does here"
    asked, draw = use(False), random.Random(2)
    for at in range(text.index(opening) + len(opening) + 6, len(text) + 1):
        assert content_of(read(tool_format, asked, pieces_of(text[:at], draw))) == text[:at]


@pytest.mark.parametrize("forced", [ToolMode.REQUIRED, ToolMode.NAMED])
def test_forced_calls_without_a_format(forced: ToolMode) -> None:
    named = forced == ToolMode.NAMED
    asked = ToolUse(forced, list(TOOLS[1:2] if named else TOOLS), b"")
    text = '{"query": "a"}' if named else CALLS["xlam"].replace("arguments", "parameters")
    for at in range(len(text) + 1):
        parts = read(None, asked, list(text[:at]))
        assert not content_of(parts)
        arguments = [part.text for part in parts if part.kind == PartKind.ARGUMENTS]
        last_begun = parts and parts[-1].kind == PartKind.CALL
        assert is_whole(parts) == bool(arguments and not last_begun and arguments[-1].endswith("}")), text[:at]


def test_the_text_of_a_custom_tool_is_whole_at_its_end() -> None:
    asked = ToolUse(ToolMode.NAMED, [Tool(ToolKind.CUSTOM, "run", {})], b"")
    assert is_whole(read(None, asked, list("ls <tool_call>")))


def test_a_header_of_harmony_is_no_content() -> None:
    [harmony] = [one for one in FORMATS if one.reads_reasoning]
    asked = use(False)
    whole = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for at in range(1, len(whole) + 1):
        if not any(whole[:at].endswith(one[:count]) for one in harmony.markers for count in range(1, len(one))):
            assert "Yes.".startswith(content_of(read(harmony, asked, list(whole[:at])))), whole[:at]


@pytest.mark.parametrize("forced", [False, True], ids=["auto", "forced"])
def test_a_character_that_is_cut_hides_no_marker(forced: bool) -> None:
    [step3] = [one for one in FORMATS if one.name == "step3"]
    asked, whole = use(forced), CALLS["step3"]
    for cut in ("<｜tool_calls_begin｜>\n<\ufffd", whole[: whole.index("</steptml:invoke>")] + "</\ufffd"):
        for pieces in ([cut], list(cut)):
            parts = read(step3, asked, pieces)
            assert not content_of(parts), (cut, parts)
    for cut in ("so \ufffd", "2 <\ufffd"):
        assert content_of(read(step3, asked, list(cut))) == ("so" if cut[0] == "s" else "2") * forced + cut * (
            not forced
        )


def test_a_character_that_is_cut_belongs_to_the_text_before_it() -> None:
    [hermes] = [one for one in FORMATS if one.name == "hermes"]
    cut = '<tool_call>{"name": "search", "arguments": {"query": "Z\ufffd'
    [begin, arguments] = read(hermes, use(False), list(cut))
    assert (begin.text, arguments.text) == ("search", '{"query": "Z\ufffd')
    custom = ToolUse(ToolMode.NAMED, [Tool(ToolKind.CUSTOM, "run", {})], b"")
    assert [part.text for part in read(None, custom, list("l\ufffd"))] == ["run", "l\ufffd", ""]
