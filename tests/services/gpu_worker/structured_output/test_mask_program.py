"""The mask program of a choice: grammar, marker, budget, lists of ids, ends; in one go as token by token."""

import itertools
import json

import msgspec
import numpy as np
import pytest
from fake_grammar_engine import FakeEngine, allowed_ids, constraint
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.services.gpu_worker.structured_output.mask_memory import num_mask_words
from blockyard.services.gpu_worker.structured_output.mask_program import MaskProgram, mask_of
from blockyard.services.gpu_worker.structured_output.matcher_frames import OutputRules
from blockyard.shared.grammars.interface import MatcherError
from blockyard.shared.messages import OutputConstraint

VOCAB, EOS = 40, [1, 39]
ALL = list(range(VOCAB))
OPEN = [token for token in ALL if token not in EOS]  # before a marker that a grammar follows


def program(
    constrained: OutputConstraint,
    allowed: list[int] | None = None,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop: list[int] | None = None,
) -> MaskProgram:
    rules = OutputRules(constrained, allowed or [], min_tokens, ignore_eos, stop or [])
    grammar = constrained.grammar
    compiled = None if grammar is None else FakeEngine(VOCAB, EOS).compile(grammar)
    return MaskProgram(rules, compiled, VOCAB, EOS)


def mask(one: MaskProgram) -> list[int]:
    words = np.full(num_mask_words(VOCAB), -1, np.int32)  # what was there before is overwritten
    one.fill(words)
    return allowed_ids(words)


def masks(one: MaskProgram, output: list[int]) -> list[list[int]]:
    """The mask of each token of an output, and of the one behind it."""
    found = []
    for token in output:
        found.append(mask(one))
        one.accept([token])
    return [*found, mask(one)]


def test_a_grammar_from_the_start_and_its_end() -> None:
    one = program(constraint(choices=[[5, 6], [5, 7, 8]]))
    assert masks(one, [5, 7, 8]) == [[5], [6, 7], [8], EOS]
    one.accept([39])
    assert one.has_ended
    assert one.num_outputs == 4


def test_reasoning_within_a_grammar_ends_with_the_budget() -> None:
    """Where the grammar does not allow the end yet, it goes on until it does."""
    ways = constraint(choices=[[5, 5, 5, 5, 9, 6], [5, 9, 6], [5, 5, 5, 9, 6], [5, 5, 9, 6]])
    one = program(msgspec.structs.replace(ways, budget=2, inner_end=9))
    assert masks(one, [5, 5, 9, 6]) == [[5], [5, 9], [9], [6], EOS]
    late = program(msgspec.structs.replace(constraint(choices=[[5, 5, 5, 9], [5, 5, 5, 6]]), budget=1, inner_end=9))
    assert masks(late, [5, 5, 5, 9]) == [[5], [5], [5], [9], EOS]


def test_ids_beyond_the_vocabulary_are_never_allowed() -> None:
    assert mask(program(OutputConstraint())) == ALL
    assert allowed_ids(mask_of([-1, 3, VOCAB, 10**9], VOCAB)) == [3]


def test_output_is_free_until_the_marker() -> None:
    one = program(constraint(begin_after=[9, 9, 8], choices=[[5]]))
    assert masks(one, [9, 9, 9, 8, 5]) == [OPEN, OPEN, OPEN, OPEN, [5], EOS]


def test_without_a_grammar_output_is_free_behind_the_marker() -> None:
    one = program(OutputConstraint(None, [9], 1))
    assert masks(one, [4, 9, 7]) == [ALL, [9], ALL, ALL]


def test_the_marker_is_forced_once_the_budget_is_used() -> None:
    two = {"begin_after": [9, 8], "choices": [[5]]}
    assert masks(program(constraint(budget=2, **two)), [3, 3, 9, 8, 5]) == [OPEN, OPEN, [9], [8], [5], EOS]
    assert masks(program(constraint(budget=0, **two)), [9, 8]) == [[9], [8], [5]]
    begun = program(constraint(budget=2, **two))  # the output has begun the marker by itself
    assert masks(begun, [3, 9, 8]) == [OPEN, OPEN, [8], [5]]


def test_an_end_before_the_marker_ends_the_output() -> None:
    one = program(constraint(begin_after=[9], choices=[[5]]))
    one.accept([4, 1])
    assert one.has_ended


def test_allowed_ids_limit_every_part() -> None:
    one = program(constraint(begin_after=[9], choices=[[5, 6], [7, 6]]), allowed=[4, 5, 6, 9])
    assert masks(one, [4, 9, 5, 6]) == [[4, 5, 6, 9], [4, 5, 6, 9], [5], [6], EOS]


def test_no_common_token_is_an_error() -> None:
    with pytest.raises(MatcherError, match="allows no token of allowed_token_ids"):
        mask(program(constraint(choices=[[5]]), allowed=[4]))
    forced = program(constraint(begin_after=[9], budget=0, choices=[[5]]), allowed=[4])
    with pytest.raises(MatcherError, match="allows no token of allowed_token_ids"):
        mask(forced)


@pytest.mark.parametrize("limits", [{"min_tokens": 9, "stop": [6]}, {"ignore_eos": True}])
def test_a_complete_grammar_ends_despite_min_tokens_and_ignore_eos(limits: dict[str, object]) -> None:
    one = program(constraint(choices=[[5], [5, 7]]), **limits)  # type: ignore[arg-type]
    assert masks(one, [5, 7]) == [[5], [7], EOS]


def test_min_tokens_bans_ends_where_other_tokens_are_allowed() -> None:
    free = [token for token in ALL if token not in (1, 6, 39)]
    assert masks(program(OutputConstraint(None, [9]), min_tokens=2, stop=[6]), [9, 4]) == [free, free, ALL]
    ignoring = OPEN
    assert masks(program(OutputConstraint(None, [9]), ignore_eos=True, stop=[6]), [9]) == [ignoring, ignoring]


def test_a_token_outside_of_the_grammar_is_an_error() -> None:
    one = program(constraint(begin_after=[9], choices=[[5, 6]]))
    with pytest.raises(MatcherError, match="token 7 is outside of the grammar"):
        one.accept([3, 9, 5, 7])
    assert one.num_outputs == 3


def behind(start: list[int], **fields: object) -> OutputConstraint:
    return msgspec.structs.replace(constraint(**fields), only_behind=start)


def test_output_that_does_not_begin_with_the_marker_is_in_the_grammar_from_the_start() -> None:
    made = behind([8], begin_after=[9], choices=[[5, 6]])
    assert masks(program(made), [5, 6]) == [[5, 8], [6], EOS]
    assert masks(program(made), [8, 3, 9, 5]) == [[5, 8], OPEN, OPEN, [5], [6]]


def test_output_may_be_a_part_of_the_marker_and_of_the_grammar() -> None:
    made = behind([5, 7], begin_after=[9], choices=[[5, 6], [5, 7, 7]])
    assert masks(program(made), [5, 6]) == [[5], [6, 7], EOS]
    assert masks(program(made), [5, 7, 9, 5, 7]) == [[5], [6, 7], OPEN, [5], [6, 7], [7]], "the longer marker counts"
    other = behind([5, 7, 8], begin_after=[9], choices=[[5, 6]])
    assert masks(program(other), [5, 7, 8, 9]) == [[5], [6, 7], [8], OPEN, [5]]
    with pytest.raises(MatcherError, match="token 4 is outside of the grammar, and begins no marker"):
        program(made).accept([4])


def test_a_budget_holds_only_for_output_that_begins_with_the_marker() -> None:
    made = behind([8], begin_after=[9], budget=2, choices=[[5, 6, 7]])
    assert masks(program(made), [8, 3, 9]) == [[5, 8], OPEN, [9], [5]]
    assert masks(program(made), [5, 6, 7])[-1] == EOS
    free = OutputConstraint(None, [9], 2, [8])
    assert masks(program(free), [4, 4, 4]) == [ALL] * 4


SMALL = st.integers(0, 4)  # few ids, so that markers overlap with themselves


@settings(max_examples=200, deadline=None)
@given(
    marker=st.lists(SMALL, max_size=4),
    start=st.lists(SMALL, max_size=3),
    budget=st.none() | st.integers(0, 6),
    has_grammar=st.booleans(),
    allowed=st.lists(SMALL, max_size=4),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    picks=st.lists(st.integers(0, 100), max_size=16),
    cuts=st.lists(st.integers(0, 16), max_size=3),
)
def test_an_output_in_one_go_gives_the_mask_of_the_same_output_token_by_token(
    marker: list[int],
    start: list[int],
    budget: int | None,
    has_grammar: bool,
    allowed: list[int],
    min_tokens: int,
    ignore_eos: bool,
    picks: list[int],
    cuts: list[int],
) -> None:
    """Draws each token from its mask. The marker ends where a plain search finds it first."""
    made = constraint(marker, budget, modulus=2, length=5) if has_grammar else OutputConstraint(None, marker, budget)
    made = msgspec.structs.replace(made, only_behind=start)

    def new() -> MaskProgram:
        return program(made, allowed, min_tokens, ignore_eos)

    one, output, last = new(), [], None
    for pick in picks:
        if one.has_ended:
            break
        try:
            last = mask(one)
        except MatcherError:
            last = None
            break
        few = [token for token in last if token < 6 or token == 39] or last
        output.append(few[pick % len(few)])
        one.accept([output[-1]])
    whole, parts = new(), new()
    whole.accept(output)
    edges = sorted({0, len(output), *(cut for cut in cuts if cut <= len(output))})
    for begin, end in itertools.pairwise(edges):
        parts.accept(output[begin:end])
    for other in (whole, parts):
        assert (other.num_outputs, other.has_ended) == (one.num_outputs, one.has_ended)
        if not one.has_ended:
            assert outcome(other) == outcome(one)
    if marker and budget is not None and not start:
        text, end = json.dumps(output)[1:-1] + ",", json.dumps(marker)[1:-1] + ","
        before = text.find(end)
        assert before < 0 or text[:before].count(",") <= budget
        assert before >= 0 or len(output) < budget + len(marker) or one.has_ended


def outcome(one: MaskProgram) -> list[int] | str:
    try:
        return mask(one)
    except MatcherError as e:
        return str(e)
