"""Masks of many sequences in one call are those of one call each, with errors of their own."""

import random

import llguidance
import numpy as np
import pytest
from grammar_rig import GUIDANCE, SOURCES, SUPPORTS, VOCABULARY, grammar
from tokenizers import Tokenizer

from blockyard.shared.grammars import guidance
from blockyard.shared.grammars.guidance import GuidanceEngine
from blockyard.shared.grammars.interface import BatchEngine, Matcher, MatcherError, Vocabulary
from blockyard.shared.grammars.matching import MatcherRules
from blockyard.shared.messages import Grammar, GrammarKind

NUM_WORDS = VOCABULARY.num_mask_words


@pytest.fixture
def engine() -> GuidanceEngine:
    made = GuidanceEngine(VOCABULARY)
    assert isinstance(made, BatchEngine)
    return made


def started(engine: GuidanceEngine, rng: random.Random) -> Matcher:
    """Behind a few random tokens of a random grammar."""
    kind = rng.choice(sorted(SUPPORTS[GUIDANCE] - {GrammarKind.JSON_OBJECT}))
    matcher = engine.compile(grammar(kind, SOURCES[kind], GUIDANCE)).matcher()
    words = np.zeros(NUM_WORDS, np.int32)
    for _ in range(rng.randrange(6)):
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert matcher.accept([int(rng.choice(allowed.tolist()))]) == 1
    return matcher


def allowed_token(matcher: Matcher, rng: random.Random) -> int | None:
    """One that ends no sequence."""
    words = np.zeros(NUM_WORDS, np.int32)
    matcher.fill(words)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    ids = [one for one in ids if one not in VOCABULARY.eos_token_ids]
    return rng.choice(ids) if ids else None


@pytest.mark.parametrize("seed", range(8))
def test_masks_are_those_of_one_call_each(engine: GuidanceEngine, seed: int) -> None:
    rng = random.Random(seed)
    made = [started(engine, rng) for _ in range(20)]
    pairs = [(matcher, token) for matcher in made if (token := allowed_token(matcher, rng)) is not None]
    assert len(pairs) > 5
    rows = rng.sample(range(30), len(pairs))
    masks, expected = np.full((30, NUM_WORDS), 7, np.int32), np.full((30, NUM_WORDS), 7, np.int32)
    copies, tokens = [matcher.copy() for matcher, _ in pairs], [token for _, token in pairs]
    assert engine.advance_many(copies, tokens, masks, rows) == {}
    for (matcher, token), row in zip(pairs, rows, strict=True):
        assert matcher.accept([token]) == 1
        matcher.fill(expected[row])
    assert np.array_equal(masks, expected)


def test_many_matchers_of_one_grammar_are_copies_of_several_instances(engine: GuidanceEngine) -> None:
    source = grammar(GrammarKind.JSON_SCHEMA, SOURCES[GrammarKind.JSON_SCHEMA], GUIDANCE)
    compiled, rng = engine.compile(source), random.Random(1)
    matchers = [compiled.matcher() for _ in range(40)]
    instances = {matcher.state.instance for matcher in matchers if isinstance(matcher.state, guidance.GuidanceState)}
    assert instances == set(range(guidance.MOST_THREADS))
    masks, expected = np.zeros((40, NUM_WORDS), np.int32), np.zeros(NUM_WORDS, np.int32)
    first = matchers[0].copy()
    for _ in range(12):
        token = allowed_token(first, rng)
        if token is None:
            break
        assert engine.advance_many(matchers, [token] * 40, masks, range(40)) == {}
        first.accept([token])
        first.fill(expected)
        assert (masks == expected).all()
    del matchers
    assert len(compiled._open) == 0


def test_a_token_outside_of_a_grammar_is_an_error_of_its_own(engine: GuidanceEngine) -> None:
    one = engine.compile(grammar(GrammarKind.REGEX, "[a-c]+", GUIDANCE))
    token = allowed_token(one.matcher(), random.Random(0))
    assert token is not None
    masks = np.zeros((2, NUM_WORDS), np.int32)
    errors = engine.advance_many([one.matcher(), one.matcher()], [5, token], masks, [0, 1])
    assert errors.keys() == {0}
    assert masks[1].any()


def test_masks_beyond_a_limit_are_errors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "STEP_MAX_ITEMS", 40)
    engine = GuidanceEngine(VOCABULARY)
    ambiguous = engine.compile(Grammar(GrammarKind.LARK, 'start: s\ns: s s s | s s | "a" |', GUIDANCE)).matcher()
    simple = engine.compile(grammar(GrammarKind.REGEX, "[a-c]+", GUIDANCE))
    masks = np.zeros((3, NUM_WORDS), np.int32)
    rng = random.Random(0)
    matchers = [simple.matcher(), ambiguous, simple.matcher()]
    letter = allowed_token(simple.matcher(), rng)
    assert letter is not None
    a = Tokenizer.from_str(VOCABULARY.tokenizer_json).token_to_id("a")
    errors: dict[int, MatcherError] = {}
    for _ in range(30):
        errors = engine.advance_many(matchers, [letter, a, letter], masks, [2, 1, 0])
        if errors:
            break
    assert errors.keys() == {1} and isinstance(errors[1], MatcherError)
    with pytest.raises(MatcherError):
        ambiguous.fill(masks[1])
    assert masks[0].any() and np.array_equal(masks[0], masks[2])


def test_after_a_slow_call_each_mask_has_its_own_limit(engine: GuidanceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, executor = [], llguidance.LLExecutor

    class Slow:
        def __init__(self, num_threads: int) -> None:
            self.library = executor(num_threads)

        def consume_token_par(self, *args: object) -> list[bool]:
            return self.library.consume_token_par(*args)  # type: ignore[arg-type]

        def unsafe_compute_mask_ptr(self, *args: object) -> None:
            calls.append(args)
            self.library.unsafe_compute_mask_ptr(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(guidance.llguidance, "LLExecutor", Slow)
    matcher = engine.compile(grammar(GrammarKind.REGEX, "[a-c]+", GUIDANCE)).matcher()
    token = allowed_token(matcher, random.Random(0))
    assert token is not None
    engine._rules.step_s = 0.0
    masks = np.zeros((1, NUM_WORDS), np.int32)
    assert engine.advance_many([matcher], [token], masks, [0]) == {}
    errors = engine.advance_many([matcher], [token], masks, [0])
    assert len(calls) == 1 and "for one token" in str(errors[0])


def test_rows_that_allow_no_token_are_named() -> None:
    """One whose only token is far behind the first words, one without any, one that may only end."""
    rules = MatcherRules(Vocabulary("", 40 * 100, [3]))
    masks = np.zeros((5, rules.num_words), np.int32)
    masks[4, -1] = -1
    masks[0, 0] = 1 << 3  # an end-of-sequence id of a text that is not complete
    assert rules.finish_rows(masks, [4, 0, 2], [False, False, True]) == [1]
    assert masks[2, 0] == 1 << 3 and not masks[0].any() and masks[4].any()
    assert rules.finish_rows(masks, [], []) == []
