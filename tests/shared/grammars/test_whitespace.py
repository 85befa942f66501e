"""Whitespace between the tokens of JSON: bounded by default, so that no model writes it until its limit."""

import json
import random
import re

import pytest
from grammar_rig import ALL, ENFORCER, EOS, GUIDANCE, OUTLINES, grammar, mask
from grammar_rig import XGRAMMAR as XG
from tokenizers import Tokenizer

from blockyard.shared.grammars.engines import Engines
from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "b": {"type": "null"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SOURCE = json.dumps(SCHEMA)
RUN = re.compile(r"[ \n\r\t]+")
# of each engine by default: the longest run, and whether it may have more than one line break
MOST = {GUIDANCE: (22, False), XG: (21, True), OUTLINES: (1, False), ENFORCER: (12, True)}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
}
OLD_TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


def blanks(engines: Engines, texts: list[bytes], source: Grammar, begin: list[int], seed: int) -> list[str]:
    """Runs of whitespace in a text of a writer that hardly writes anything else."""
    rng, matcher, out = random.Random(seed), engines.compile(source).matcher(), b""
    assert matcher.accept(begin) == len(begin)
    for _ in range(200):
        allowed = [i for i in sorted(mask(matcher)) if i not in EOS]
        blank = [i for i in allowed if not texts[i].strip()]
        written = sorted((i for i in allowed if texts[i].strip()), key=lambda i: len(texts[i]))[:8]
        if not allowed:
            break
        chosen = rng.choice(blank if blank and (not written or rng.random() < 0.95) else written)
        matcher.accept([chosen])
        out += texts[chosen]
    return RUN.findall(out.decode("utf-8", "replace"))


@pytest.mark.parametrize("engine", ALL)
def test_runs_of_whitespace_are_bounded(engines: Engines, texts: list[bytes], engine: GrammarEngine) -> None:
    runs = [
        run
        for seed in range(10)
        for run in blanks(engines, texts, grammar(GrammarKind.JSON_SCHEMA, SOURCE, engine), [], seed)
    ]
    most, breaks = MOST[engine]
    assert most - 1 <= max(map(len, runs)) <= most
    if not breaks:
        assert all(re.fullmatch(r"(\r?\n)?[ \t]{0,20}", run) for run in runs)
        assert max(len(run) for run in runs if "\n" not in run) == 1


@pytest.mark.parametrize("tag", [TAG, OLD_TAG])
def test_runs_of_whitespace_in_structural_tags_are_bounded(
    engines: Engines, texts: list[bytes], tokenizer: Tokenizer, tag: object
) -> None:
    begin = tokenizer.encode("<f>{", add_special_tokens=False).ids
    source = grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), XG)
    runs = [run for seed in range(5) for run in blanks(engines, texts, source, begin, seed)[:4]]
    assert 20 <= max(map(len, runs)) <= 21


def test_json_in_lark_has_the_same_bound(engines: Engines, texts: list[bytes]) -> None:
    source = grammar(GrammarKind.LARK, f"start: value\nvalue: %json {SOURCE}", GUIDANCE)
    assert max(len(run) for seed in range(5) for run in blanks(engines, texts, source, [], seed)) <= 22


@pytest.mark.parametrize("engine", [GUIDANCE, XG])
@pytest.mark.parametrize("indent", [None, 0, 2, 4, "\t"])
def test_json_as_programs_write_it_is_taken(
    engines: Engines, tokenizer: Tokenizer, engine: GrammarEngine, indent: int | str | None
) -> None:
    nested: object = [1]
    for _ in range(2):
        nested = [nested, {"k": nested}]
    compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, "{}", engine))
    for separators in (None, (",", ":")):
        text = json.dumps(nested, indent=indent, separators=separators)
        for written in (text, text.replace("\n", "\r\n")):
            ids = tokenizer.encode(written, add_special_tokens=False).ids
            if engine == XG and max(map(len, RUN.findall(written)), default=0) > 21:
                continue
            matcher = compiled.matcher()
            assert matcher.accept(ids) == len(ids) and matcher.is_complete(), written


def test_a_client_s_own_pattern_and_no_whitespace_hold_as_they_are(engines: Engines, texts: list[bytes]) -> None:
    for options, most in (({"whitespace_pattern": r"\n{1,40}"}, 40), ({"any_whitespace": False}, 0)):
        source = grammar(GrammarKind.JSON_SCHEMA, SOURCE, GUIDANCE, **options)
        runs = [run for seed in range(5) for run in blanks(engines, texts, source, [], seed)]
        assert max(map(len, runs), default=0) == most
