"""Text from a peer in log lines. `test_malformed_frames.py` tests which frames are logged, and how often."""

import pytest

from blockyard.shared.bus.frames import WORDS_CHARS, in_log


@pytest.mark.parametrize(
    ("words", "logged"),
    [
        (77, "77"),
        ("worker 0", "worker 0"),
        (ValueError("no such tag"), "no such tag"),
        ("two\nlines\x1b[31m", "two\\nlines\\x1b[31m"),
        ("ä🙂", "\\xe4\\U0001f642"),
        ("x" * WORDS_CHARS, "x" * WORDS_CHARS),
        ("x" * WORDS_CHARS + "y", "x" * WORDS_CHARS + "..."),
    ],
)
def test_text_of_a_peer_is_one_short_printable_line(words: object, logged: str) -> None:
    assert in_log(words) == logged
