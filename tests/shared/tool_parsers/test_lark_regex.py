"""Lark grammars without recursion as regular expressions; the others have none."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from blockyard.shared.grammars.guidance import GuidanceEngine
from blockyard.shared.grammars.interface import Vocabulary
from blockyard.shared.messages import GrammarDefaults, ToolDefaults
from blockyard.shared.ring_client.request_fields.forced_calls import calls_grammar
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats, read_output_form
from blockyard.shared.ring_client.request_fields.tools import TEXT_PARAMETERS, ToolMode, ToolUse
from blockyard.shared.tool_parsers.lark_regex import MAX_CHARS, lark_regex
from blockyard.shared.tool_parsers.tools import TextGrammar, TextSyntax, Tool, ToolKind

TOKENIZER = Path(__file__).parents[3] / "shared/demo_model/tokenizer.json"

PATCH = r"""
// what coding agents send for edits of files
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add | update
    | delete  // in the next line
add: "*** Add File: " name LF ("+" /(.*)/ LF -> line)+
delete.2: "*** Delete File: " name LF
?update: "*** Update File: " name LF [move] change
name: /(.+)/
move: "*** Move to: " name LF
change: (("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF)+

%import common.LF
"""
GOOD = [
    "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch\n",
    "*** Begin Patch\n*** Delete File: a b\n*** Update File: c\n*** Move to: d\n@@ def f\n-a\n+b\n c\n*** End Patch",
]
BAD = [
    "",
    "x",
    GOOD[0] + "x",
    "*** Begin Patch\n*** End Patch\n",
    GOOD[0].replace("+x", "x"),
    GOOD[1].replace("-a", "a"),
]


def test_the_grammar_of_patches() -> None:
    found = lark_regex(PATCH)
    assert found is not None
    assert all(re.fullmatch(found, text) for text in GOOD) and not any(re.fullmatch(found, text) for text in BAD)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a"', ["a"], ["", "aa", "b"]),
        ('start: "a.b" | "[c]"i', ["a.b", "[c]", "[C]"], ["axb", "A.B"]),
        ('start: A B?\nA: "a".."c"\nB: /x\\/y/', ["a", "cx/y"], ["d", "x/y"]),
        ('start: "a"~2..3 "b"~2', ["aabb", "aaabb"], ["abb", "aaaabb"]),
        ('start: "a"{2} "b"{1,} "c"{0,1}', ["aab", "aabbc"], ["ab", "aa"]),
        ('start: ["a"] ("b" | "c")* ', ["", "abcb", "cc"], ["aa"]),
        ('start: "\\n\\t\\"" /./s /[^a]/', ['\n\t"\nb'], ['\n\t"\na']),
        ('start: ("a"+)?', ["", "aaa"], ["b"]),
        ("start: WORD INT\n%import common.WORD\n%import common.INT", ["ab12"], ["12", "ab"]),
        ('start: x\nx: "a" y | "b"\ny: "c" -> named\n  | "d"', ["ac", "ad", "b"], ["a", "bc"]),
        ('start: "\u00e9\\\\"', ["\u00e9\\"], ["\\"]),
    ],
)
def test_texts_of_a_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    found = lark_regex(grammar)
    assert found is not None
    assert [text for text in good if not re.fullmatch(found, text)] == []
    assert [text for text in bad if re.fullmatch(found, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        'other: "a"',
        'start: "(" start? ")"',
        'start: x\nx: y\ny: "a" x | "b"',
        "start: missing",
        'start: "a',
        'start: ("a"',
        'start: "a" )',
        'start: "a"\nstart: "b"',
        "start: /a(?=b)/",
        "start: /^a$/",
        "start: /a/m",
        "start: /\\bword/",
        'start: %json {"type": "object"}',
        'start: "a"\n%ignore " "',
        "%import common.ESCAPED_STRING\nstart: ESCAPED_STRING",
        "start: <special>",
        'start: "a" & "b"',
        "start: a\n"
        + "\n".join(f'{chr(97 + i)}: "{"x" * 40}" {chr(98 + i)} {chr(98 + i)}' for i in range(20))
        + '\nu: "y"',
    ],
)
def test_grammars_that_are_none(grammar: str) -> None:
    assert lark_regex(grammar) is None


def test_the_size_is_bounded() -> None:
    assert lark_regex('start: "' + "a" * (MAX_CHARS + 1) + '"') is None
    deep = "start: " + "(" * 5000 + '"a"' + ")" * 5000
    assert lark_regex(deep) is None


def test_a_patch_within_a_call_is_limited_where_the_model_decides() -> None:
    """By an engine. Functions beside it may have any arguments, also of schemas that no engine enforces."""
    patch = Tool(ToolKind.CUSTOM, "apply_patch", TEXT_PARAMETERS, False, TextGrammar(TextSyntax.LARK, PATCH))
    other = Tool(
        ToolKind.FUNCTION, "f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    )
    use, formats = ToolUse(ToolMode.AUTO, [patch, other], b""), OutputFormats.load(ToolDefaults(parser="hermes"))
    found = calls_grammar(read_output_form(use, formats), use, formats, GrammarDefaults())
    assert found is not None
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    compiled = GuidanceEngine(Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), [1])).compile(found.grammar)

    def call(name: str, **arguments: object) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"

    def accepts(text: str) -> bool:
        ids, matcher = tokenizer.encode(text, add_special_tokens=False).ids, compiled.matcher()
        return matcher.accept(ids) == len(ids) and matcher.is_complete()

    assert all(accepts(f"Let me see. {call('apply_patch', input=text)}") for text in GOOD)
    assert not any(accepts(call("apply_patch", input=text)) for text in BAD)
    assert accepts("No call at all.") and accepts(call("f", a=[1, 1], b={}))
    quoted = GOOD[0].replace("x = 1", 'x = "\u00e9\\n"')
    assert accepts(call("apply_patch", input=quoted) + "\n" + call("f"))
