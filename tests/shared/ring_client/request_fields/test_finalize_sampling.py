"""max_tokens and the context length, and sampling without an allowed token."""

import msgspec
import pytest

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    Grammar,
    GrammarKind,
    ModelCard,
    ModelSettings,
    OutputConstraint,
    Sampling,
    Tokenized,
    ToolDefaults,
)
from blockyard.shared.ring_client.request_fields.finalize_sampling import CALL_TOKENS, finalize_sampling

TEXTS = ToolDefaults(reasoning_end="</think>", reasoning_other_ends=["<tool_call>"])
CARD = ModelCard(["m"], "m", 100, 300, 0, [2])
REASONS = msgspec.structs.replace(CARD, settings=ModelSettings(tools=TEXTS))
ANY = Grammar(GrammarKind.JSON_OBJECT, "")


def settled(num_prompt_tokens: int, max_tokens: int | None, max_new_tokens: int | None = None) -> int:
    sampling = Sampling(1)
    return finalize_sampling(
        sampling,
        Tokenized("", bytes(4 * num_prompt_tokens), b""),
        card=CARD,
        max_tokens=max_tokens,
        seed=0,
        max_new_tokens=max_new_tokens,
    ).max_tokens


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "expected"),
    [(90, 10, 10), (90, 11, 10), (90, 10**30, 10), (90, None, 10), (99, 5, 1), (99, 0, 1), (100, 0, 0)],
)
def test_max_tokens_is_clamped_to_what_is_left(num_prompt_tokens: int, max_tokens: int | None, expected: int) -> None:
    assert settled(num_prompt_tokens, max_tokens) == expected


def test_the_cap_of_the_deployment_still_holds() -> None:
    assert (settled(10, 10**6, 7), settled(97, 10**6, 7)) == (7, 3)


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(100, 1), (100, None), (101, 0), (101, 1)])
def test_a_prompt_that_does_not_fit_is_told_so(num_prompt_tokens: int, max_tokens: int | None) -> None:
    with pytest.raises(RequestError) as caught:
        settled(num_prompt_tokens, max_tokens)
    assert caught.value.field == "prompt" and caught.value.code == "context_length_exceeded"
    assert f"has {num_prompt_tokens} input tokens" in str(caught.value)
    assert ("at least one" in str(caught.value)) == (num_prompt_tokens == 100)


@pytest.mark.parametrize(
    ("sampling", "bad_words", "fits"),
    [
        (Sampling(1, allowed_token_ids=[2]), [], True),
        (Sampling(1, allowed_token_ids=[2], min_tokens=1), [], False),
        (Sampling(1, allowed_token_ids=[2, 5], min_tokens=1), [], True),
        (Sampling(1, allowed_token_ids=[2, 5], min_tokens=1, stop_token_ids=[5, 6]), [], False),
        (Sampling(1, allowed_token_ids=[2, 5], min_tokens=1), [[5]], False),
        (Sampling(1, allowed_token_ids=[5]), [[5]], False),
        (Sampling(1, allowed_token_ids=[5]), [[5, 6]], True),
        (Sampling(1, min_tokens=1), [[5]], True),
    ],
)
def test_some_token_must_be_left(sampling: Sampling, bad_words: list[list[int]], fits: bool) -> None:
    prompt = Tokenized("", bytes(20), b"", bad_words)
    if fits:
        finalize_sampling(sampling, prompt, card=CARD, max_tokens=4, seed=0)
        return
    with pytest.raises(RequestError) as caught:
        finalize_sampling(sampling, prompt, card=CARD, max_tokens=4, seed=0)
    assert (caught.value.field, caught.value.status) == ("allowed_token_ids", 400)


def test_the_checked_grammar_becomes_the_constraint() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    prompt = Tokenized("", bytes(20), b"", grammar=grammar)
    done = finalize_sampling(Sampling(1), prompt, card=CARD, max_tokens=4, seed=0)
    assert done.constraint is not None and done.constraint.grammar == grammar
    assert (
        finalize_sampling(Sampling(1), Tokenized("", bytes(20), b""), card=CARD, max_tokens=4, seed=0).constraint
        is None
    )


def test_a_grammar_without_reasoning_begins_at_once() -> None:
    """Where the prompt is inside of reasoning, its end is forced at once, and otherwise there is none."""

    def made(only_behind: list[int], grammar: Grammar | None) -> OutputConstraint | None:
        prompt = Tokenized("", bytes(4), b"", grammar=grammar, begin_after=[7], only_behind=only_behind)
        return finalize_sampling(Sampling(1), prompt, card=REASONS, max_tokens=9, seed=0, thinking_budget=0).constraint

    assert made([5], ANY) == OutputConstraint(ANY)
    assert made([], ANY) == OutputConstraint(ANY, [7], 0, [], "</think>", ["<tool_call>"])
    assert made([5], None) == OutputConstraint(None, [7], 0, [5], "</think>", ["<tool_call>"])


@pytest.mark.parametrize(
    ("max_tokens", "budget", "expected"),
    [(600, None, 600 - CALL_TOKENS), (100, None, 50), (1, None, 1), (600, 20, 20), (600, 500, 600 - CALL_TOKENS)],
)
def test_a_forced_call_has_room_behind_reasoning(max_tokens: int, budget: int | None, expected: int) -> None:
    prompt = Tokenized("", bytes(4), b"", grammar=ANY, begin_after=[7])
    card = msgspec.structs.replace(CARD, max_model_len=1000)
    done = finalize_sampling(
        Sampling(1), prompt, card=card, max_tokens=max_tokens, seed=0, thinking_budget=budget, call_is_forced=True
    )
    assert done.constraint == OutputConstraint(ANY, [7], expected)
    within = finalize_sampling(
        Sampling(1),
        Tokenized("", bytes(4), b"", grammar=ANY, inner_end=9),
        card=card,
        max_tokens=max_tokens,
        seed=0,
        thinking_budget=budget,
        call_is_forced=True,
    )
    assert within.constraint == OutputConstraint(ANY, budget=expected, inner_end=9)


@pytest.mark.parametrize(
    ("begin_after", "grammar", "budget", "expected"),
    [
        ([], None, None, None),
        ([], None, 5, None),  # the prompt has ended reasoning
        ([], ANY, 5, OutputConstraint(ANY)),
        ([7, 8], ANY, None, OutputConstraint(ANY, [7, 8])),
        ([7, 8], ANY, 5, OutputConstraint(ANY, [7, 8], 5)),
        ([7, 8], None, 0, OutputConstraint(None, [7, 8], 0)),
    ],
)
def test_a_grammar_begins_where_reasoning_ends(
    begin_after: list[int], grammar: Grammar | None, budget: int | None, expected: OutputConstraint | None
) -> None:
    prompt = Tokenized("", bytes(4), b"", grammar=grammar, begin_after=begin_after)
    sampling = finalize_sampling(Sampling(1), prompt, card=CARD, max_tokens=9, seed=0, thinking_budget=budget)
    assert sampling.constraint == expected
