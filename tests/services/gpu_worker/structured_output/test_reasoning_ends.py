"""The end of reasoning in whatever tokens spell it: where a grammar begins, and which tokens may not come before."""

import random
from pathlib import Path

import numpy as np
import pytest
from fake_grammar_engine import FakeEngine, allowed_ids, constraint

from blockyard.services.gpu_worker.structured_output.mask_program import MaskProgram
from blockyard.services.gpu_worker.structured_output.matcher_frames import MatcherSettings, OutputRules
from blockyard.services.gpu_worker.structured_output.reasoning_ends import EndsByText, ReasoningEnds, load_texts
from blockyard.shared.grammars.interface import GrammarError
from blockyard.shared.messages import OutputConstraint
from blockyard.shared.messages.grammars import GrammarEngine

DEMO = Path(__file__).parents[4] / "shared/demo_model"
EOS = [0]
TEXTS = [
    b"",
    b"r",
    b"e",
    b"ret",
    b"urn",
    b"return",
    b" return",
    b"return ",
    b"returns",
    b"urn\n",
    b"urnx",
    b"</",
    b"call",
]
ENDS = ReasoningEnds(TEXTS, len(TEXTS), "return", ["</call"])
MARKER, GRAMMAR = [5], constraint([5], choices=[[1, 2]])


def program(budget: int | None = None, ends: ReasoningEnds | None = ENDS) -> MaskProgram:
    constrained = OutputConstraint(GRAMMAR.grammar, MARKER, budget)
    compiled = FakeEngine(len(TEXTS), EOS).compile(GRAMMAR.grammar)  # type: ignore[arg-type]
    return MaskProgram(OutputRules(constrained, [], 0, False, []), compiled, len(TEXTS), EOS, ends)


def mask(one: MaskProgram) -> list[bytes]:
    words = np.zeros(1, np.int32)
    one.fill(words)
    return [TEXTS[token] for token in allowed_ids(words)]


@pytest.mark.parametrize(
    "spelled",
    [[b"return"], [b" return"], [b"return "], [b"ret", b"urn"], [b"r", b"e", b"ret", b"urn\n"], [b"ret", b"return"]],
)
def test_a_grammar_begins_behind_the_text_of_its_marker(spelled: list[bytes]) -> None:
    one = program()
    for text in spelled:
        assert text in mask(one)
        one.accept([TEXTS.index(text)])
    assert mask(one) == [b"r"]
    assert one.num_outputs == len(spelled)


def test_ids_alone_do_not_tell_the_end() -> None:
    one = program(ends=None)
    one.accept([TEXTS.index(b" return")])
    assert len(mask(one)) == len(TEXTS) - len(EOS)


def test_no_token_goes_on_behind_the_end_and_none_ends_reasoning_without_a_grammar() -> None:
    one, free = program(), set(TEXTS[1:])
    assert set(mask(one)) == free - {b"returns"}
    one.accept([3])
    assert set(mask(one)) == free - {b"returns", b"urnx"}
    one.accept([1])
    assert set(mask(one)) == free - {b"returns"}
    one.accept([11])
    assert set(mask(one)) == free - {b"returns", b"call"}


def test_a_budget_forces_the_marker() -> None:
    one = program(budget=1)
    one.accept([3])
    assert mask(one) == [b"return"]
    one.accept([5])
    assert mask(one) == [b"r"]


def test_ends_are_those_of_the_text_of_a_real_tokenizer() -> None:
    """Random tokens, against the text that they spell together."""
    texts = load_texts(MatcherSettings(GrammarEngine.GUIDANCE, str(DEMO), 2048, EOS, 1, 0.0))
    draw = random.Random(0)
    for end in ("e", "in", "re", "</think>", "<|im_end|>"):
        ends, before, text = ReasoningEnds(texts, len(texts), end, []), b"", b""
        for _ in range(3000):
            token = draw.randrange(len(texts))
            banned = token in allowed_ids(ends.banned(before))
            following = before + texts[token]
            at = following.find(end.encode())
            assert banned == (at >= 0 and bool(following[at + len(end) :].strip()))
            before, is_end = ends.follow(before, token)
            text += texts[token]
            assert is_end == (end.encode() in text)
            if is_end:
                before, text = b"", b""


def test_the_ends_of_a_deployment_are_made_once() -> None:
    loads: list[None] = []

    def load() -> list[bytes]:
        loads.append(None)
        return TEXTS

    found, asked = EndsByText(load, len(TEXTS)), OutputConstraint(None, [5], 3, [], "return", ["x"])
    assert found.are_ready(OutputConstraint(None, [5])) and found.of(OutputConstraint(None, [5])) is None
    assert not found.are_ready(asked)
    assert found.of(asked) is found.of(asked) is not None
    assert found.are_ready(asked) and len(loads) == 1


def test_without_the_texts_of_tokens_ids_tell_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> list[bytes]:
        raise GrammarError("no texts")

    assert EndsByText(load, 9).of(OutputConstraint(None, [5], None, [], "return")) is None
    assert "no texts" in caplog.text
