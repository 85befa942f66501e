"""Prompts with a hole. The judge of the ids is the tokenizer itself, which reads the markers in a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_rig import text_config
from tokenizers import AddedToken, Tokenizer

from blockyard.services.tokenizer_pool.chats.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.fill_in_middle import FAMILIES, FillInMiddle
from blockyard.services.tokenizer_pool.text_codec import TextCodec
from blockyard.services.tokenizer_pool.token_chars import max_token_chars
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import TextRejected, Tokenize, Tokenized
from blockyard.shared.token_ids import unpack

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|endoftext|>")
BEFORE, BEHIND = "def the_fox(jumps):\n    return ", "\n\nprint(the_fox(3))\n"
# markers of each family as its model card writes a prompt
CARDS = {
    "qwen": (QWEN, f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>"),
    "starcoder": (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"),
        f"<fim_prefix>{BEFORE}<fim_suffix>{BEHIND}<fim_middle>",
    ),
    "deepseek": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        f"<｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{BEHIND}<｜fim▁end｜>",
    ),
    "codestral": (("[PREFIX]", "[SUFFIX]"), f"[SUFFIX]{BEHIND}[PREFIX]{BEFORE}"),
    "codellama": (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), f"▁<PRE>{BEFORE}▁<SUF>{BEHIND}▁<MID>"),
}


def with_markers(tokenizer: Tokenizer, markers: tuple[str, ...]) -> Tokenizer:
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    return own


def codec(tokenizer: Tokenizer, template: str | None = None) -> TextCodec:
    config = text_config(fim_template=template)
    size = tokenizer.get_vocab_size()
    return TextCodec(tokenizer, size, ChatTemplates({}, {}), config, max_token_chars(tokenizer))


def asked(texts: TextCodec, **fields: object) -> Tokenized | TextRejected:
    answer = texts.answer(Tokenize("r", "m", **{"text": BEFORE, "suffix": BEHIND, "max_tokens": 1000, **fields}))  # type: ignore[arg-type]
    assert isinstance(answer, Tokenized | TextRejected)
    return answer


@pytest.mark.parametrize("family", CARDS)
def test_a_prompt_is_what_the_model_card_writes(byte_tokenizer: Tokenizer, family: str) -> None:
    markers, written = CARDS[family]
    tokenizer = with_markers(byte_tokenizer, markers)
    answer = asked(codec(tokenizer))
    assert isinstance(answer, Tokenized), answer
    assert list(unpack(answer.token_ids)) == tokenizer.encode(written).ids  # with the BOS of its post-processor
    ends = {tokenizer.token_to_id(marker) for marker in markers}
    assert set(answer.stop_token_ids) == ends


def test_the_text_of_a_prompt_has_its_markers_and_the_suffix(byte_tokenizer: Tokenizer) -> None:
    texts = codec(with_markers(byte_tokenizer, QWEN))
    answer = asked(texts, want_text=True)
    assert isinstance(answer, Tokenized), answer
    assert answer.text.endswith(f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>")


def test_each_family_has_both_places() -> None:
    for family in FAMILIES:
        assert family.template.count("{prefix}") == family.template.count("{suffix}") == 1


def test_a_tokenizer_without_markers_says_so(byte_tokenizer: Tokenizer) -> None:
    answer = asked(codec(byte_tokenizer))
    assert isinstance(answer, TextRejected) and answer.field == "suffix" and "--fim-template" in answer.message
    assert codec(byte_tokenizer).answer(Tokenize("r", "m", text=BEFORE)) is not None


def test_an_own_template(byte_tokenizer: Tokenizer) -> None:
    """Its markers may be several tokens; those that are one end the answer."""
    answer = asked(codec(byte_tokenizer, "[TOOL]{suffix} the fox {prefix}"))
    assert isinstance(answer, Tokenized)
    parts = ("[TOOL]", BEHIND, " the fox ", BEFORE)
    ids = [i for part in parts for i in byte_tokenizer.encode(part, add_special_tokens=False).ids]
    assert list(unpack(answer.token_ids)) == [byte_tokenizer.token_to_id("<s>"), *ids]
    assert answer.stop_token_ids == [byte_tokenizer.token_to_id("[TOOL]")]


@pytest.mark.parametrize("template", ["{prefix}", "{suffix}<m>", "{prefix}{suffix}{prefix}", "", "<pre><suf>"])
def test_a_template_without_both_places_is_refused(byte_tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(ConfigError, match="--fim-template"):
        codec(byte_tokenizer, template)


@given(
    before=st.text("the fox.\n", max_size=80),
    behind=st.text("jumps over", max_size=80),
    most=st.integers(5, 60),
    own=st.sampled_from([None, "<|fim_suffix|>{suffix}<|fim_prefix|>{prefix}"]),
)
def test_texts_are_cut_far_from_the_hole(
    byte_tokenizer: Tokenizer, before: str, behind: str, most: int, own: str | None
) -> None:
    tokenizer = with_markers(byte_tokenizer, QWEN)
    answer = asked(codec(tokenizer, own), text=before, suffix=behind, max_tokens=most)
    assert isinstance(answer, Tokenized), answer
    ids = list(unpack(answer.token_ids))
    assert len(ids) <= most
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in (before, behind)]
    marks = 4 if own is None else 3  # with BOS
    kept = _kept(ids, tokenizer, own)
    for text, part, end in ((whole[0], kept[0], True), (whole[1], kept[1], False)):
        assert part == (text[len(text) - len(part) :] if end else text[: len(part)])
    if len(whole[0]) + len(whole[1]) + marks <= most:
        assert kept == whole
    else:
        assert len(ids) == most
        assert len(kept[1]) >= min(len(whole[1]), (most - marks) // 4)


def _kept(ids: list[int], tokenizer: Tokenizer, own: str | None) -> list[list[int]]:
    first, second = (tokenizer.token_to_id(f"<|fim_{name}|>") for name in ("prefix", "suffix"))
    if own is None:
        at = ids.index(second)
        return [ids[2:at], ids[at + 1 : -1]]
    at = ids.index(first)
    return [ids[at + 1 :], ids[2:at]]


def test_a_text_of_megabytes_is_cut_before_it_is_encoded(byte_tokenizer: Tokenizer) -> None:
    fills = FillInMiddle(with_markers(byte_tokenizer, QWEN))
    seen: list[int] = []

    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return list(range(len(text)))

    assert len(fills.prompt("a" * 10**7, "b" * 10**7, [], encode, 64, 8)) == 64
    assert max(seen) <= 64 * 8


def test_markers_that_do_not_fit(byte_tokenizer: Tokenizer) -> None:
    answer = asked(codec(with_markers(byte_tokenizer, QWEN)), max_tokens=4)
    assert isinstance(answer, TextRejected) and answer.code == "context_length_exceeded" and answer.field == "suffix"
