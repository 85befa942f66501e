"""Offsets of tokens in the text: special tokens, characters of several tokens, text behind its tokens."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.api_gateway.apis.text_offsets import TextOffsets

FISH = "🐟".encode()


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        ([b"<s>", b"hello", b" world"], "hello world", [0, 0, 5]),
        ([b"<s>", b" hello", b" world"], "hello world", [0, 0, 5]),  # sentencepiece drops the first space
        ([b"<s>", b"hello", b" world"], "<s>hello world", [0, 3, 8]),  # a prompt of ids shows its BOS
        ([b"<s>", b"a", b"<s>"], "a<s>", [0, 0, 1]),
        ([b"x", FISH[:2], FISH[2:], b"y"], "x🐟y", [0, 1, 1, 2]),
        (["\ufffd".encode(), FISH[2:3], FISH[3:], b"y"], "🐟y", [0, 0, 0, 1]),  # the first one's bytes are not known
        ([FISH[:3], b"abc"], "\ufffdabc", [0, 1]),
        ([b"\xff", b"\xfe", b"a"], "\ufffd\ufffda", [0, 2, 2]),
        ([b"a", b"<|end|>", b"<|start|>", b"b"], "ab", [0, 1, 1, 1]),
        ([b"caf\xc3\xa9", b" Bar", b" baz"], "Cafe\u0301 Bar baz", [0, 5, 9]),  # normalised
        ([b"", b"a"], "a", [0, 0]),
        ([], "", []),
    ],
)
def test_a_whole_text(tokens: list[bytes], text: str, offsets: list[int]) -> None:
    assert TextOffsets().take(tokens, text) == offsets


def test_text_that_arrives_behind_its_tokens() -> None:
    found = TextOffsets()
    assert found.take([b"x", FISH[:2]], "x") == [0, 1]
    assert found.take([FISH[2:], b" st"], "🐟") == [1, 2]  # ` st` may begin a stop string
    assert found.take([b"op"], "") == [5]
    assert found.take([b"!"], " stop!") == [7]
    assert found.take([b"</s>"], "") == [8]
    assert found.take([b"a"], "a") == [8]


@given(st.text(max_size=30), st.integers(0, 2**32))
def test_any_pieces_of_any_text(text: str, seed: int) -> None:
    """Whole and streamed answers have the same offsets."""
    text = text.encode("utf-8", "ignore").decode().replace("\ufffd", "")
    data, rng = text.encode(), random.Random(seed)
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(8))})
    tokens = [data[a:b] for a, b in itertools.pairwise(cuts)]
    expected = [len(data[:cut].decode("utf-8", "ignore")) for cut in cuts[:-1]]
    assert TextOffsets().take(tokens, text) == expected
    found, streamed, shown = TextOffsets(), [], 0
    for token, end in zip(tokens, cuts[1:], strict=True):
        whole = data[:end].decode("utf-8", "ignore")
        streamed += found.take([token], whole[shown:])
        shown = len(whole)
    assert streamed == expected


def test_names_of_ids_add_up() -> None:
    found = TextOffsets(tokens_as_ids=True)
    assert found.take([b"token_id:1", b"token_id:22"], "ab") == [0, 10]
    assert found.take([b"token_id:3"], "c") == [21]
