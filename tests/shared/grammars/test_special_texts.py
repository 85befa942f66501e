"""Texts of grammars that name special tokens: written by ordinary tokens, except for markers, which are the tokens."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from grammar_rig import ALL, ENFORCER, EOS, GUIDANCE, NUM_TOKENS, SUPPORTS, VOCABULARY, grammar
from tokenizers import AddedToken, Tokenizer

from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.interface import Matcher, Vocabulary
from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo model's, with more added tokens, of which only `<mask>` is special."""
    tokenizer = Tokenizer.from_str(VOCABULARY.tokenizer_json)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<b>", "</b>", "\n\n", "[X]", "wörd")])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    assert tokenizer.encode("a <mask> <b>", add_special_tokens=False).ids[1:] == [NUM_TOKENS + 5, NUM_TOKENS]
    return tokenizer


@pytest.fixture(scope="module")
def engines(tokenizer: Tokenizer) -> Engines:
    eos = (*EOS, tokenizer.token_to_id("[X]"))  # which is not marked as special
    return Engines(Vocabulary(tokenizer.to_str(), NUM_TOKENS + 70, eos))


def written(matcher: Matcher, tokenizer: Tokenizer, seed: int, most: int = 400) -> list[int]:
    """Tokens of a text that random allowed tokens write, without its end-of-sequence token."""
    rng, ids = random.Random(seed), list[int]()
    words = np.zeros(VOCABULARY.num_mask_words, np.int32)
    for _ in range(most):
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        visible = [i for i in allowed if tokenizer.decode([i]).strip()] or allowed
        token = next((i for i in EOS if i in allowed), None) or rng.choice(visible)
        assert matcher.accept([token]) == 1, (tokenizer.decode(ids), tokenizer.decode([token], False))
        if token in EOS:
            return ids
        ids.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(ids, False)}")


NAMED = ["<|im_start|>user", "a <mask> b", "<b>bold</b>", "\n\n<|im_end|>\n\n", "[X]<b>wörd<|bos|>", "say <|im_start|>"]
LATE = "the text before it is long enough for several tokens: "
CASES: dict[str, tuple[GrammarKind, str]] = {
    "choice": (GrammarKind.CHOICE, json.dumps(NAMED)),
    "late": (GrammarKind.CHOICE, json.dumps([LATE + text for text in NAMED] + ["the text"])),
    "regex": (GrammarKind.REGEX, r"x{1,2}(<b>[a-z]{3}</b>|y<mask>[0-9])<\|im_start\|>(<\|im_end\|>)?"),
    "ebnf": (GrammarKind.EBNF, 'root ::= "<b>" [a-c] "</b><|im_start|>" ("<mask>" | "x <mask>")'),
    "lark": (GrammarKind.LARK, 'start: "<b>" /[a-c]/ "</b><|im_start|>" ("<mask>" | "x <mask>")'),
}
SCHEMAS = {
    "const": {"const": "<|im_start|>user <b>"},
    "enum": {"enum": [text for text in NAMED if text.isprintable()]},
    "pattern": {"type": "string", "pattern": r"^<b>[a-z]{2}(<\|im_start\|>|</b>)$"},
    "names": {
        "type": "object",
        "properties": {"<|im_end|>": {"type": "boolean"}, "a<b>": {"enum": ["<mask>"]}},
        "required": ["<|im_end|>", "a<b>"],
        "additionalProperties": False,
    },
}
PATTERNS = {
    "regex": CASES["regex"][1],
    "ebnf": r"<b>[a-c]</b><\|im_start\|>(<mask>|x <mask>)",
    "lark": r"<b>[a-c]</b><\|im_start\|>(<mask>|x <mask>)",
}


@pytest.mark.parametrize(
    ("engine", "name"), [(e, name) for e in ALL for name in CASES if CASES[name][0] in SUPPORTS[e]]
)
def test_a_text_that_names_special_tokens_is_written(
    engines: Engines, tokenizer: Tokenizer, engine: GrammarEngine, name: str
) -> None:
    kind, source = CASES[name]
    if engine == ENFORCER and kind == GrammarKind.CHOICE:
        source = json.dumps([text for text in json.loads(source) if text.isascii()])
    compiled = engines.compile(grammar(kind, source, engine))
    for seed in range(12):
        ids = written(compiled.matcher(), tokenizer, seed)
        text = tokenizer.decode(ids, skip_special_tokens=True)  # as a client is shown it
        assert re.fullmatch(PATTERNS[name], text) if name in PATTERNS else text in json.loads(source)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_that_names_special_tokens_is_written(
    engines: Engines, tokenizer: Tokenizer, engine: GrammarEngine, name: str
) -> None:
    schema = SCHEMAS[name]
    if engine == ENFORCER and name == "enum":
        schema = {"enum": [text for text in NAMED if text.isascii() and text.isprintable()]}
    compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), engine))
    for seed in range(6):
        text = tokenizer.decode(written(compiled.matcher(), tokenizer, seed), skip_special_tokens=True)
        jsonschema.validate(json.loads(text), schema)


def test_forced_text_is_spelled_as_the_tokenizer_spells_it_around_special_tokens(
    engines: Engines, tokenizer: Tokenizer
) -> None:
    source = '{"first name":"<b>bold</b> and more","second name":"plain"}'
    matcher = engines.compile(grammar(GrammarKind.CHOICE, json.dumps([source]), GUIDANCE)).matcher()
    forced = matcher.forced()
    assert tokenizer.decode(forced) == source and matcher.accept(forced) == len(forced)
    before, rest = source.split("<b>")
    ids = tokenizer.encode(before, add_special_tokens=False).ids
    assert forced[: len(ids)] == ids
    behind = tokenizer.encode(rest.split("</b>")[1], add_special_tokens=False).ids
    assert forced[-len(behind) :] == behind


@pytest.mark.parametrize("marker", ["<b>", "<mask>", "<|im_start|>"])
def test_markers_are_the_special_tokens_themselves(engines: Engines, tokenizer: Tokenizer, marker: str) -> None:
    """Grammars of tool calls name them so. In strings of JSON between markers the same text is ordinary."""
    schema = json.dumps({"const": f"{marker}x"})
    source = f"start: marker_0 rule_1 marker_0\nrule_1: %json {schema}"
    compiled = engines.compile(Grammar(GrammarKind.LARK, source, GUIDANCE, markers=[marker]))
    token = tokenizer.token_to_id(marker)
    ids = written(compiled.matcher(), tokenizer, 0)
    assert ids[0] == ids[-1] == token and ids.count(token) == 2
    assert json.loads(tokenizer.decode(ids[1:-1], False)) == f"{marker}x"
    by_id = Grammar(GrammarKind.LARK, f'start: "{marker}" <[{token}]> "end"', GUIDANCE)
    ids = written(engines.compile(by_id).matcher(), tokenizer, 0)
    assert ids.count(token) == 1 and tokenizer.decode(ids, False) == f"{marker}{marker}end"


def with_bytes_in_the_model(tokenizer: Tokenizer) -> Tokenizer:
    """Tokens of bytes are no added tokens, as in Llama 2's tokenizer."""
    files = json.loads(tokenizer.to_str())
    for token in files["added_tokens"]:
        if token["content"].startswith("<0x"):
            files["model"]["vocab"][token["content"]] = token["id"]
    files["added_tokens"] = [token for token in files["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(files))


@pytest.mark.parametrize("name", ["byte_tokenizer", "sentence_tokenizer"])
def test_other_kinds_of_tokenizers(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer = with_bytes_in_the_model(request.getfixturevalue(name))
    end = tokenizer.token_to_id("</s>")
    vocabulary = Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])
    words = np.zeros(vocabulary.num_mask_words, np.int32)
    for text in ("<s>yes", "say </s>yes <|im_end|>", "x<think> é<|im_start|>[TOOL] <0x41>y"):
        matcher = Engines(vocabulary).compile(grammar(GrammarKind.CHOICE, json.dumps([text]), GUIDANCE)).matcher()
        ids: list[int] = []
        while not matcher.is_complete():
            matcher.fill(words)
            ids.append(int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]))
            assert matcher.accept(ids[-1:]) == 1, (text, ids)
        # behind a token, because the decoder takes a space from the first one
        first = tokenizer.encode("y", add_special_tokens=False).ids
        assert tokenizer.decode(first + ids, skip_special_tokens=True) == "y" + text
