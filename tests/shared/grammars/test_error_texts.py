"""Causes without the source that libraries quote."""

import random

from blockyard.shared.grammars.error_texts import MAX_CHARS, MAX_QUOTED, guidance_cause, one_line, without_source


def test_names_stay_and_longer_quotes_go() -> None:
    source = 'root ::= a_rule\n  "some text of the client, which goes on and on"'
    assert without_source("Rule 'a_rule' not found", source) == "Rule 'a_rule' not found"
    quoted = 'error in a_rule "some text of the client, which goes on and on" at line 2'
    assert without_source(quoted, source) == "error in... at line 2"
    assert without_source("", source) == "" and without_source(quoted, "") == quoted


def test_no_long_part_of_a_source_is_left() -> None:
    words = random.Random(1)
    for _ in range(300):
        source = "".join(words.choices("ab", k=words.randrange(200)))
        message = "".join(words.choices("ab", k=30)) + source[words.randrange(50) :] + "".join(words.choices("ab", k=9))
        left = without_source(message, source)
        for piece in left.split("..."):
            assert not any(piece[i : i + MAX_QUOTED + 1] in source for i in range(len(piece) - MAX_QUOTED))
        assert len(left) <= len(message)


def test_places_are_told_where_the_lines_are_the_clients() -> None:
    error = 'at 2(6): unknown name: "x"\n   1 | start: bar\n   2 | bar: x\n            ^\n'
    assert guidance_cause(error, True) == 'line 2, column 6: unknown name: "x"'
    assert guidance_cause(error, False) == 'unknown name: "x"'


def test_an_error_has_one_line_of_bounded_length() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 10_000)) == MAX_CHARS + 3
