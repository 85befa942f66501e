"""Grammars whose first mask is fine, and that fail later: refused when they are checked, or taken by another engine."""

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from grammar_rig import ALL, EOS, GUIDANCE, NUM_TOKENS, OUTLINES, SOURCES, SUPPORTS, grammar
from grammar_rig import XGRAMMAR as XG
from tokenizers import Tokenizer

from blockyard.shared.grammars import trial_walks
from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.interface import (
    CompiledGrammar,
    GrammarError,
    MaskWords,
    Matcher,
    MatcherError,
    UnsupportedGrammar,
)
from blockyard.shared.grammars.matching import set_bits
from blockyard.shared.grammars.trial_walks import TrialWalks
from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_walks, "WALK_S", 1.0)


def schema(value: object) -> tuple[GrammarKind, str]:
    return GrammarKind.JSON_SCHEMA, json.dumps(value)


OBJECTS: dict[str, Any] = {"enum": [{"a": i, "b": str(i)} for i in range(2100)]}
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(501)},
    "additionalProperties": False,
}
# kind and source, a part of the cause, and whether xgrammar takes them
FAILING: dict[str, tuple[tuple[GrammarKind, str], str, bool]] = {
    "501 optional properties": (schema(OPTIONAL), "behind '{'.* 2003 items", True),
    "the same, open": (schema({**OPTIONAL, "additionalProperties": True}), "behind '{'", True),
    "the same, within": (schema({"type": "array", "items": OPTIONAL, "minItems": 3}), r"behind '\[{'", True),
    "an enum of 2100 objects": (schema(OBJECTS), "2100 items", True),
    "the same, behind a string": (
        schema({"type": "object", "properties": {"k": {"type": "string"}, "e": OBJECTS}, "required": ["k", "e"]}),
        """behind '{"k":"","e":""",
        True,
    ),
    "a required name that is all of a pattern": (
        schema({"type": "object", "required": ["a"], "patternProperties": {"^a$": {}}, "additionalProperties": False}),
        "no token of the model here",
        False,
    ),
    "a count that is too high": ((GrammarKind.REGEX, "a{300000}"), "too many expressions", True),
    "the same, behind text": (
        (GrammarKind.REGEX, "(x|y)[0-9]{3}a{300000}"),
        "behind '.*too many",
        True,
    ),
    "a rule without an end": ((GrammarKind.EBNF, 'root ::= "a" b\nb ::= "c" b'), "too many items", True),
    "two patterns that exclude each other": (
        (GrammarKind.LARK, "start: /[a-z]{4}/ T\nT: /[a-z]+/ & /[0-9]+/"),
        "behind '....': the grammar allows no token of the model here",
        False,
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_grammar_that_fails_behind_its_first_tokens_is_refused(engines: Engines, name: str) -> None:
    (kind, source), cause, _ = FAILING[name]
    with pytest.raises(UnsupportedGrammar) as caught:
        engines.compile(grammar(kind, source, GUIDANCE))
    assert re.search(cause, str(caught.value), re.IGNORECASE), str(caught.value)


@pytest.mark.parametrize("name", FAILING)
def test_another_engine_may_take_it(engines: Engines, name: str) -> None:
    (kind, source), _, is_taken = FAILING[name]
    found = grammar(kind, source, GrammarEngine.AUTO)
    if is_taken:
        assert engines.resolve(found).engine == XG
    else:
        with pytest.raises(GrammarError):
            engines.resolve(found)


@pytest.mark.parametrize("engine", ALL)
def test_grammars_that_can_be_followed_are_taken(engines: Engines, engine: GrammarEngine) -> None:
    for kind, source in SOURCES.items():
        if kind in SUPPORTS[engine]:
            engines.compile(grammar(kind, source, engine))
    if engine != GrammarEngine.LM_FORMAT_ENFORCER:  # whose steps are slow
        times = 2_000 if engine == OUTLINES else 10_000  # its tables take a time that is quadratic in the length
        engines.compile(grammar(GrammarKind.CHOICE, json.dumps(["no", "long " * times]), engine))
        engines.compile(grammar(GrammarKind.REGEX, "[a-z ]{1,200}!", engine))


class Script:
    """A grammar and its only matcher: any of `tokens` may come until `length` of them are there; then nothing may."""

    def __init__(
        self, tokens: list[int], length: int, forced: int = 0, mask_s: float = 0.0, error: Exception | None = None
    ) -> None:
        self._error = error or MatcherError("no token")
        self._tokens, self._length, self._num_forced, self._mask_s = tokens, length, forced, mask_s
        self.lengths: list[int] = []
        self._taken: list[int] = []

    def matcher(self) -> "Script":
        self._taken = []
        self.lengths.append(0)
        return self

    def fill(self, words: MaskWords) -> None:
        until_s = time.process_time() + self._mask_s
        while time.process_time() < until_s:
            pass
        if len(self._taken) >= self._length:
            raise self._error
        set_bits(words, self._tokens)

    def accept(self, token_ids: list[int]) -> int:
        self._taken += token_ids
        self.lengths[-1] += len(token_ids)
        return len(token_ids)

    def forced(self) -> list[int]:
        return self._tokens * (self._num_forced if not self._taken else 0)

    def is_complete(self) -> bool:
        return False


TEXTS = [b"ab", b"c", b" ", b"      ", b"", b'"', b"}"]


def walked(script: Script) -> list[int]:
    """How far each walk has come."""
    TrialWalks(TEXTS, 1).check(script)  # type: ignore[arg-type]
    return script.lengths


def test_how_far_walks_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MatcherError, match="no first token of this model: no token"):
        walked(Script([0, 1], 0))
    with pytest.raises(MatcherError, match=r"behind 'c{30}': no token"):
        walked(Script([0, 1], 40))
    with pytest.raises(MatcherError, match=r"behind ' {30}': no token"):
        walked(Script([2, 3], 40))
    with pytest.raises(MatcherError, match="behind 'cc': RuntimeError"):
        walked(Script([0, 1], 2, error=RuntimeError()))
    with pytest.raises(MemoryError):
        walked(Script([0, 1], 2, error=MemoryError()))
    assert walked(Script([0, 1], 100)) == [trial_walks.MOST_MASKS] * 3
    assert walked(Script([0], 10**6, forced=5000)) == [5000 + trial_walks.MOST_MASKS - 1] * 3
    assert walked(Script([4], 100)) == [0] * 3  # a special token, or an end
    slow = walked(Script([0, 1], 100, mask_s=trial_walks.WALK_S / 4))
    assert sum(slow) <= 4 and len(slow) == 3  # the first mask of each walk is made


def test_the_checks_of_ordinary_grammars_are_short(
    engines: Engines, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_walks, "WALK_S", 15.0)
    compiled: CompiledGrammar = engines.load(GUIDANCE).compile(Grammar(*schema({"type": "object"}), GUIDANCE))
    found: list[list[int]] = []  # tokens of each walk

    def recorded_matcher() -> Matcher:
        matcher, ids = compiled.matcher(), list[int]()
        found.append(ids)
        accept = matcher.accept
        matcher.accept = lambda token_ids: ids.extend(token_ids) or accept(token_ids)  # type: ignore[method-assign]
        return matcher

    texts = [tokenizer.decode([i], skip_special_tokens=True).encode() for i in range(NUM_TOKENS)]
    TrialWalks(texts, -(-(NUM_TOKENS + 70) // 32)).check(SimpleNamespace(matcher=recorded_matcher))  # type: ignore[arg-type]
    _, out, _ = found  # the second walk leaves strings and brackets as soon as it can
    assert tokenizer.decode(out) == "{}" and not set(out) & set(EOS)
