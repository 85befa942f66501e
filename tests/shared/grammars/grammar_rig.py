"""The demo model's tokenizer, the languages of test grammars, and masks as sets of token ids."""

import json
from pathlib import Path

import numpy as np

from blockyard.shared.grammars.interface import Matcher, Vocabulary
from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind

ROOT = Path(__file__).parents[3]
NUM_TOKENS = 4096
EOS = (1, 3)  # <|endoftext|>, <|im_end|>
VOCABULARY = Vocabulary((ROOT / "shared/demo_model/tokenizer.json").read_text("utf-8"), NUM_TOKENS + 70, EOS)

GUIDANCE, XGRAMMAR = GrammarEngine.GUIDANCE, GrammarEngine.XGRAMMAR
OUTLINES, ENFORCER = GrammarEngine.OUTLINES, GrammarEngine.LM_FORMAT_ENFORCER
ALL = (GUIDANCE, XGRAMMAR, OUTLINES, ENFORCER)

WORDS = ["yes", "yesterday", "no", 'a "quoted"\\ one', "naïve café", "東京", "🎉!"]
# grammars with few texts, so that a test knows each allowed token
FINITE: dict[str, tuple[GrammarKind, str, list[str]]] = {
    "choice": (GrammarKind.CHOICE, json.dumps(WORDS), WORDS),
    "regex": (GrammarKind.REGEX, "(ab?c|é東)x{1,2}", [a + x for a in ("ac", "abc", "é東") for x in ("x", "xx")]),
    "ebnf": (
        GrammarKind.EBNF,
        'root ::= "let " name "="\nname ::= [x-z] | "é"{2,3} # a comment\n',
        [f"let {name}=" for name in ("x", "y", "z", "éé", "ééé")],
    ),
    "ebnf, left recursion": (GrammarKind.EBNF, 'root ::= "a" | root "b" "c"', ["a" + "bc" * n for n in range(9)]),
    "lark": (
        GrammarKind.LARK,
        'start: "on" NUMBER | start_of "off"\nstart_of: "go "\nNUMBER: /[0-3]{1,2}/',
        ["go off"] + [f"on{n}" for n in "0123"] + [f"on{m}{n}" for m in "0123" for n in "0123"],
    ),
}
SUPPORTS = {
    GUIDANCE: set(GrammarKind) - {GrammarKind.STRUCTURAL_TAG},
    XGRAMMAR: set(GrammarKind),
    OUTLINES: {GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.JSON_SCHEMA},
    ENFORCER: {GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "b", "c d"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
}
SOURCES = {  # one of each kind
    GrammarKind.JSON_SCHEMA: json.dumps(SCHEMA),
    GrammarKind.JSON_OBJECT: "",
    GrammarKind.REGEX: "[a-c]+",
    GrammarKind.CHOICE: '["a", "b"]',
    GrammarKind.EBNF: 'root ::= "a"',
    GrammarKind.LARK: 'start: "a"',
    GrammarKind.STRUCTURAL_TAG: json.dumps(
        {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}
    ),
}


def grammar(kind: GrammarKind, source: str, engine: GrammarEngine, **options: object) -> Grammar:
    return Grammar(kind, source, engine, **options)  # type: ignore[arg-type]


def mask(matcher: Matcher) -> set[int]:
    words = np.full(VOCABULARY.num_mask_words, -1, dtype=np.int32)
    matcher.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
