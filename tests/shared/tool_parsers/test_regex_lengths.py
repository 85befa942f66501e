import re

import pytest

from blockyard.shared.grammars.format_patterns import FORMAT_PATTERNS
from blockyard.shared.tool_parsers.regex_lengths import UNBOUNDED, LengthRange, regex_lengths


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("", 0, 0),
        ("abc", 3, 3),
        ("^a$", 1, 1),
        (r"\d{3}-\d{4}", 8, 8),
        ("a{2,}", 2, UNBOUNDED),
        ("a{2,5}?b*", 2, UNBOUNDED),
        ("(ab|c)?d+", 1, UNBOUNDED),
        ("(ab|c|)", 0, 2),
        ("(?:ab){2}", 4, 4),
        ("(?P<n>a)(?<m>b)", 2, 2),
        ("(?s:.{4,6})", 4, 6),
        ("a(?=bc)(?!x)(?<=y)", 1, 1),
        (r"[a\]b]{2}[^]x][\w-]", 4, 4),
        (r"\x41\u0041\\\n", 4, 4),
        ("(|)*", 0, 0),
        (r"\p{L}[a-z", 0, UNBOUNDED),
        (r"\p{L}\.", 2, 2),
        ("(" * 60 + "a" + ")" * 60, 0, UNBOUNDED),
        ("a)", 0, UNBOUNDED),
        ("(a", 0, UNBOUNDED),
    ],
)
def test_bounds(pattern: str, least: float, most: float) -> None:
    assert regex_lengths(pattern) == LengthRange(least, most)


TEXTS = {
    "date": "2024-02-29",
    "time": "23:59:60.5Z",
    "date-time": "2024-02-29T01:02:03.123456789+01:00",
    "duration": "P1Y2M",
    "email": "a@b.c",
    "hostname": "a-b.c",
    "ipv4": "255.1.2.3",
    "ipv6": "::1",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "uri": "http://a/b?c",
}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_bounds_of_formats_hold_for_their_texts(name: str) -> None:
    found, text = regex_lengths(FORMAT_PATTERNS[name]), TEXTS[name]
    if re.fullmatch(FORMAT_PATTERNS[name], text):
        assert 0 < found.least <= len(text) <= found.most
    assert found != LengthRange(0, UNBOUNDED)


def test_dates_are_known_exactly() -> None:
    assert regex_lengths(FORMAT_PATTERNS["date"]) == LengthRange(10, 10)
    assert regex_lengths(FORMAT_PATTERNS["uuid"]) == LengthRange(36, 36)
    assert regex_lengths(FORMAT_PATTERNS["date-time"]).least == 20
