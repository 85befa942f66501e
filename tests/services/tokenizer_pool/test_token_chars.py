"""The bound on a text's characters: no text that fits is rejected, and long texts are not encoded."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rig import text_config
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from blockyard.services.tokenizer_pool.chats.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.text_codec import TextCodec
from blockyard.services.tokenizer_pool.token_chars import TokenChars, max_token_chars
from blockyard.shared import tokenizer_files
from blockyard.shared.messages import TextRejected, Tokenize, Tokenized

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def copy(tokenizer: Tokenizer) -> Tokenizer:
    made: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    return made


def of(tokenizer: Tokenizer) -> TokenChars:
    chars = max_token_chars(tokenizer)
    assert chars is not None
    return chars


def with_normalizer(normalizer: normalizers.Normalizer) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizer

    return change


def with_split(split: pre_tokenizers.PreTokenizer) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return change


def with_mask(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])


BOUNDED: dict[str, Callable[[Tokenizer], None]] = {
    "plain": lambda tokenizer: None,
    "NFC": with_normalizer(normalizers.NFC()),
    "NFKC": with_normalizer(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "replaced": with_normalizer(normalizers.Replace("the ", "t")),
    "stripped": with_normalizer(normalizers.Strip()),
    "words": with_split(pre_tokenizers.WhitespaceSplit()),
    "removed spaces": with_split(pre_tokenizers.Split(" ", "removed")),
    "mask": with_mask,
}
UNBOUNDED: dict[str, Callable[[Tokenizer], None]] = {
    "accents": with_normalizer(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "deleted": with_normalizer(normalizers.Replace("x", "")),
    "runs": with_normalizer(normalizers.Replace(Regex("x+"), "x")),
    "removed": with_split(pre_tokenizers.Split("x", "removed")),
    "delimited": with_split(pre_tokenizers.CharDelimiterSplit("x")),
    "control": with_normalizer(normalizers.BertNormalizer()),
}
TEXTS = st.text(
    st.one_of(st.sampled_from("the quick fox\t\n \u3000é\u0301\u1100\u1161\u11a8東🎉"), st.characters(codec="utf-8")),
    max_size=60,
)
PIECES = st.lists(st.one_of(TEXTS, st.sampled_from(["<|im_start|>", "<mask>", "  ", "the quick "])), max_size=12)


@pytest.mark.parametrize("name", BOUNDED)
@given(pieces=PIECES)
@settings(max_examples=60, deadline=None)
def test_no_text_that_fits_is_refused(byte_tokenizer: Tokenizer, name: str, pieces: list[str]) -> None:
    tokenizer = copy(byte_tokenizer)
    BOUNDED[name](tokenizer)
    text = "".join(pieces)
    assert of(tokenizer).fits(text, len(tokenizer.encode(text, add_special_tokens=False).ids))


@given(pieces=PIECES)
@settings(max_examples=60, deadline=None)
def test_no_text_that_fits_is_refused_with_byte_fallback(sentence_tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    num_tokens = len(sentence_tokenizer.encode(text, add_special_tokens=False).ids)
    assert of(sentence_tokenizer).fits(text, num_tokens)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_drops_any_character_has_no_bound(byte_tokenizer: Tokenizer, name: str) -> None:
    tokenizer = copy(byte_tokenizer)
    UNBOUNDED[name](tokenizer)
    assert max_token_chars(tokenizer) is None


def test_unknown_words_and_characters_have_no_bound(word_tokenizer: Tokenizer) -> None:
    assert max_token_chars(word_tokenizer) is None
    assert max_token_chars(Tokenizer(models.BPE())) is None  # drops unknown characters
    assert (
        max_token_chars(Tokenizer(models.BPE(vocab={"?": 0, "ab": 1}, merges=[], unk_token="?", fuse_unk=True))) is None
    )
    one_each = Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?"))
    assert max_token_chars(one_each) == TokenChars(1)


def test_the_demo_models_bound() -> None:
    assert max_token_chars(tokenizer_files.load("shared/demo_model").tokenizer) == TokenChars(45)


def test_dropped_white_space_does_not_count() -> None:
    chars = TokenChars(2, whitespace_lost=True)
    assert chars.fits("ab" + " \t\n" * 99 + "cd", 2) and not chars.fits("ab" + " " * 99 + "cde", 2)
    assert not TokenChars(2).fits("ab  c", 2)


def test_a_text_that_is_too_long_is_refused_unread(byte_tokenizer: Tokenizer) -> None:
    chars = of(byte_tokenizer)
    templates = ChatTemplates({"default": TEMPLATE}, {})
    texts = TextCodec(byte_tokenizer, 1000, templates, text_config(), chars)
    limit = chars.most * 10
    message = b'[{"role": "user", "content": "%s"}]'
    for work, field in (
        (Tokenize("r", "m", text="x" * (limit + 1), max_tokens=10), "prompt"),
        (Tokenize("r", "m", messages=message % (b"x" * (limit + 1)), max_tokens=10), "messages"),
        (Tokenize("r", "m", text="x" * limit, max_tokens=10), "prompt"),  # its tokens are counted
        (Tokenize("r", "m", token_ids=bytes(4 * 11), max_tokens=10), "prompt"),
    ):
        answer = texts.tokenize(work)
        assert isinstance(answer, TextRejected), work
        assert (answer.field, answer.code) == (field, "context_length_exceeded")
        assert re.search("maximum context length|model's context length", answer.message)
    assert isinstance(texts.tokenize(Tokenize("r", "m", token_ids=bytes(40), max_tokens=10)), Tokenized)
    assert isinstance(texts.tokenize(Tokenize("r", "m", text="x" * (limit + 1))), Tokenized)  # it will be truncated
