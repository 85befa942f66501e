import pytest
from recorded_answers import Answer, call, check_answer, content, reasoning

from blockyard.shared.output_parsing.compose import in_order, read_content, trimmed, with_custom_inputs
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.reasoning_parsers.marked import marked
from blockyard.shared.tool_parsers.json_calls.families import HERMES

THINKS = marked("<think>", "</think>", also_ends_before=("<tool_call>",))
CALL = '<tool_call>{"name": "note", "arguments": {"input": "say \\"a\\"\\n\\ud83d\\ude00"}}</tool_call>'


def read(text: TextInput, opened: bool | None = None):
    whole = in_order(lambda text: THINKS(text, opened), lambda text: HERMES.read(text, ()))
    return with_custom_inputs(trimmed(whole), ["note"])(text)


@pytest.mark.parametrize(
    "answer",
    [
        Answer("plain", " a b \n", content("a b \n")),
        Answer("reasons", "<think>\nx y\n</think>\n\nz", reasoning("x y") + content("z")),
        Answer("calls", f"<think>\nx\n</think>\n\n{CALL}\n", reasoning("x") + call("note", 'say "a"\n😀')),
        Answer("never ends", "<think>x</thin", reasoning("x</thin")),
        Answer("forgets the end", f"<think>x\n{CALL}", reasoning("x") + call("note", 'say "a"\n😀')),
        Answer("content before a call", f"z\n\n{CALL}", content("z") + call("note", 'say "a"\n😀')),
    ],
    ids=lambda a: a.name,
)
def test_reasoning_calls_and_content(answer: Answer) -> None:
    check_answer(read, answer)


@pytest.mark.parametrize(
    ("opened", "text", "parts"),
    [
        (True, "x</think>y", reasoning("x") + content("y")),
        (True, "<think>x</think>y", reasoning("x") + content("y")),
        (False, "x</think>y", content("x</think>y")),
        (None, "x</think>y", content("x</think>y")),
    ],
)
def test_the_prompt_may_have_opened_reasoning(opened: bool | None, text: str, parts: tuple) -> None:
    check_answer(lambda text: read(text, opened), Answer("", text, parts))


@pytest.mark.parametrize("damaged", ["no object", '{"input": 3}', '{"other"', "{"])
def test_damaged_custom_inputs_stay_as_they_are(damaged: str) -> None:
    def one_call(text: TextInput):
        yield from call("note", "")[:1]
        yield from text.rest(call("note", "x")[1].kind)
        yield call("note", "")[-1]

    check_answer(with_custom_inputs(one_call, ["note"]), Answer("", damaged, call("note", damaged)))


def test_without_a_format_all_is_content() -> None:
    check_answer(read_content, Answer("", "<think>a", content("<think>a")))
