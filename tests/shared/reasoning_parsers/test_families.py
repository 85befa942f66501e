"""Recorded reasoning of each family, whichever way the prompt ends."""

import pytest
from recorded_answers import (
    Answer,
    call,
    check_answer,
    check_held_back,
    check_mutations,
    content,
    reasoning,
    tool_reader,
)

from blockyard.shared.errors import ConfigError
from blockyard.shared.output_parsing.compose import in_order, read_content, trimmed, without_marks
from blockyard.shared.output_parsing.parts import Part
from blockyard.shared.output_parsing.reader import Format
from blockyard.shared.parser_plugins import format_of_template
from blockyard.shared.parser_plugins import reasoning_format as with_plugin
from blockyard.shared.reasoning_parsers.interface import ReasoningFormat
from blockyard.shared.reasoning_parsers.registry import FORMATS, reasoning_format
from blockyard.shared.tool_parsers.json_calls.families import HERMES

BEHIND_REASONING = [one for one in FORMATS if one.name not in ("minimax_m2_append_think", "openai_gptoss")]
ALWAYS_REASON = ("deepseek_r1", "olmo3", "ernie45", "step3", "minimax_m2", "nemotron_v3", "holo2")
CALL = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
NAMES = {
    "deepseek_r1", "deepseek_v3", "qwen3", "mimo", "mistral", "granite", "glm45", "kimi_k2", "openai_gptoss", "olmo3",
    "hunyuan_a13b", "ernie45", "seed_oss", "step3", "minimax_m2", "minimax_m2_append_think", "nemotron_v3", "gemma4",
    "holo2", "think",
}  # fmt: skip
EACH = pytest.mark.parametrize("one", BEHIND_REASONING, ids=lambda one: one.name)


def reader(one: ReasoningFormat, opened: bool | None, behind: Format = read_content) -> Format:
    """A reader of answers: reasoning, then the rest."""
    if one.answer_marks:
        behind = without_marks(behind, *one.answer_marks)
    return trimmed(in_order(lambda text: one.read(text, opened), behind))


def answers(one: ReasoningFormat, opened: bool | None) -> list[Answer]:
    """`opened`: the answer begins inside of reasoning."""
    begin, end = "" if opened else one.start + "\n", one.end
    both = reasoning("Two < 3.\n\nSo [it] is {fine}.") + content("Fine.")
    return [
        Answer("both", f"{begin}Two < 3.\n\nSo [it] is {{fine}}.\n{end}\n\nFine.", both),
        Answer("empty", f"{begin}\n{end}\n\nFine.", content("Fine.")),
        Answer("nothing behind", f"{begin}Because.{end}", reasoning("Because.")),
        Answer("unicode", f"{begin}Zürich 東京 😀{end}é", reasoning("Zürich 東京 😀") + content("é")),
        Answer("twice", f"{begin}a{end}b {end} c", reasoning("a") + content(f"b {end} c")),
        Answer("cut short", f"{begin}Because it", reasoning("Because it")),
        Answer("cut in the marker", f"{begin}Because{end[:-1]}", reasoning("Because" + end[:-1])),
        Answer("marker like", f"{begin}a <thin {end[:2]} b{end}c", reasoning(f"a <thin {end[:2]} b") + content("c")),
    ]


@EACH
@pytest.mark.parametrize("opened", [True, None])
def test_reasoning_is_told_from_the_answer(one: ReasoningFormat, opened: bool | None) -> None:
    for answer in answers(one, opened):
        check_answer(reader(one, opened), answer)


@EACH
def test_a_model_may_repeat_the_marker_of_the_prompt(one: ReasoningFormat) -> None:
    text = f"{one.start}\nBecause.{one.end}Fine."
    check_answer(reader(one, True), Answer("", text, reasoning("Because.") + content("Fine.")))


@EACH
def test_without_reasoning_all_is_content(one: ReasoningFormat) -> None:
    plain = Answer("", f"It is {one.end[:3]} fine.", content(f"It is {one.end[:3]} fine."))
    check_answer(reader(one, False), plain)
    if one.name not in ALWAYS_REASON:
        check_answer(reader(one, None), plain)


@pytest.mark.parametrize("name", ALWAYS_REASON)
def test_models_that_always_reason_need_no_marker(name: str) -> None:
    one = reasoning_format(name)
    text = f"Because.{one.end}Fine."
    check_answer(reader(one, None), Answer("", text, reasoning("Because.") + content("Fine.")))
    check_answer(reader(one, False), Answer("", text, content(text)))


@pytest.mark.parametrize("name", ["qwen3", "mimo", "glm45", "nemotron_v3", "ernie45"])
def test_calls_end_reasoning_that_the_model_forgot_to_end(name: str) -> None:
    one = reasoning_format(name)
    answer = Answer("", f"Because.\n{CALL}", reasoning("Because.") + call("get_time", "{}"))
    check_answer(reader(one, True, tool_reader(HERMES)), answer)


@pytest.mark.parametrize(
    ("name", "call_marker"),
    [
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("hunyuan_a13b", "<tool_calls>"),
        ("step3", "<｜tool_calls_begin｜>"),
        ("minimax_m2", "<minimax:tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("seed_oss", "<seed:tool_call>"),
        ("gemma4", "<|tool_call>"),
    ],
)
def test_markers_of_calls_stay_for_the_format_of_calls(name: str, call_marker: str) -> None:
    answer = Answer("", f"Because.{call_marker}x", reasoning("Because.") + content(f"{call_marker}x"))
    check_answer(reader(reasoning_format(name), True), answer)


@EACH
def test_damaged_reasoning(one: ReasoningFormat) -> None:
    for opened in (True, None):
        markers = (one.start, one.end, *one.answer_marks)
        check_mutations(reader(one, opened), answers(one, opened), 150, markers)


@EACH
def test_little_is_held_back(one: ReasoningFormat) -> None:
    longest = max(map(len, (*one.answer_marks, *one.markers, one.start, one.end)))
    check_held_back(lambda text: one.read(text, True), f"a {one.end[:-1]} b {one.end[:2]}{one.end[:4]} c", longest)


@pytest.mark.parametrize("name", ["hunyuan_a13b", "ernie45", "granite"])
@pytest.mark.parametrize(
    ("behind", "parts"),
    [
        ("\n\n{0}\nFine.\n{1}\n", content("Fine.")),
        ("Fine.", content("Fine.")),
        ("{0}Fine.", content("Fine.")),
        ("Fine.{1}", content("Fine.{1}")),
        ("{0}a {0} b{1} c {1}", content("a {0} b c {1}")),
        ("{0}Look:\n" + CALL + "\n{1}", content("Look:") + call("get_time", "{}")),
        (CALL + "{0}a{1}", call("get_time", "{}") + content("a")),
        ("{0}cut short {1}"[:-1], content("cut short {1}"[:-1])),
    ],
)
def test_tags_around_the_answer_are_removed(name: str, behind: str, parts: tuple) -> None:
    one = reasoning_format(name)
    start, end = one.answer_marks
    tags = [(part.text.replace("{0}", start).replace("{1}", end), part) for part in parts]
    if behind.endswith("{1"):
        behind, tags = behind.replace("{1", end[:-1]), [("cut short " + end[:-1], parts[0])]
    text = f"{one.start}a{one.end}{behind.replace('{0}', start).replace('{1}', end)}"
    expected = (*reasoning("a"), *(Part(part.kind, text) for text, part in tags))
    check_answer(reader(one, None, tool_reader(HERMES)), Answer("", text, expected))


@pytest.mark.parametrize("begin", ["Here is my thought process:", "Here's my thought process:"])
@pytest.mark.parametrize("end", ["Here is my response:", "Here's my response:"])
def test_granite_writes_phrases(begin: str, end: str) -> None:
    granite = reasoning_format("granite")
    text = f"{begin}\n\nBecause. Here is why.\n\n{end}\n\nFine."
    check_answer(reader(granite, None), Answer("", text, reasoning("Because. Here is why.") + content("Fine.")))


@pytest.mark.parametrize(
    ("opened", "text", "shown"),
    [
        (True, "Because.\n</think>\n\nFine.", "<think>\nBecause.\n</think>\n\nFine."),
        (True, "<think>Because.</think>Fine.", "<think>Because.</think>Fine."),
        (None, "<think>\nBecause.</think>Fine.", "<think>\nBecause.</think>Fine."),
        (None, "Fine.", "Fine."),
        (False, "Fine.", "Fine."),
        (True, "cut sho", "<think>\ncut sho"),
        (True, "\n\nZürich </thin 東京", "<think>\n\n\nZürich </thin 東京"),
        (True, "", "<think>\n"),
    ],
)
def test_append_think_leaves_reasoning_in_the_content(opened: bool | None, text: str, shown: str) -> None:
    one = reasoning_format("minimax_m2_append_think")
    read = in_order(lambda text: one.read(text, opened), read_content)
    check_answer(read, Answer("", text, content(shown)))


def test_all_names_are_there() -> None:
    assert {one.name for one in FORMATS} == NAMES


def test_markers_of_ones_own() -> None:
    one = reasoning_format("think:<note>...</note>")
    assert (one.name, one.start, one.end, one.markers) == (
        "think:<note>...</note>", "<note>", "</note>", ("<note>", "</note>"),
    )  # fmt: skip
    both = reasoning("a") + content("b")
    check_answer(reader(one, None), Answer("", "<note>a</note>b", both))
    check_answer(reader(one, True), Answer("", "a</note>b", both))
    check_answer(reader(one, None), Answer("", "a</note>b", content("a</note>b")))
    opens = reasoning_format("think:...[done]")
    check_answer(reader(opens, None), Answer("", "a[done]b", both))
    check_answer(reader(opens, False), Answer("", "a[done]b", content("a[done]b")))
    assert with_plugin(one.name).end == "</note>"


@pytest.mark.parametrize("name", ["think:", "think:<note>", "think:<note>...", "think:a...a", "think:... "])
def test_wrong_markers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"START\.\.\.END"):
        reasoning_format(name)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if enable_thinking %}<think>{% endif %}", "qwen3"),
        ("<|im_start|>assistant", ""),
        ("<|channel>thought\n<channel|>{% if enable_thinking %}", "gemma4"),
        ("[gMASK]<sop>{{ '<think>' if enable_thinking }}", "glm45"),
        ("{% set thinking = false %}<｜Assistant｜></think>", "deepseek_v3"),
        ("<｜Assistant｜><think>\\n", "deepseek_r1"),
        ("<｜Assistant｜>{{ content.split('</think>') }}", ""),
        ("{{ truncate_history_thinking }} {% if enable_thinking %}<think>", "nemotron_v3"),
        ("<|extra_0|> enable_thinking <think>", "hunyuan_a13b"),
        ("[THINK]", "mistral"),
    ],
)
def test_templates_tell_the_family(template: str, name: str) -> None:
    found = format_of_template(template, FORMATS)
    assert (found.name if found else "") == name
