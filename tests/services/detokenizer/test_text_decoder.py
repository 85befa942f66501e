"""Streaming equals the tokenizer's own decode of all ids, for any ids and any division into pushes."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken as HfToken
from tokenizers import Tokenizer

from blockyard.services.detokenizer.text_decoder import new_decoder
from blockyard.services.detokenizer.token_table import AdapterTables, TokenKind, TokenTable, UnknownToken
from blockyard.shared.messages import AddedToken, StreamOpen, TextOptions

FAMILIES = ["byte_tokenizer", "sentence_tokenizer", "metaspace_tokenizer", "word_tokenizer"]
ids_strategy = st.lists(st.integers(0, 10**6), max_size=24)
quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def added_tokens(first: int) -> list[AddedToken]:
    return [AddedToken(first, "<note>"), AddedToken(first + 1, "<end>", is_special=True)]


def table_of(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(tokenizer, tokenizer.get_vocab_size())


def streamed(
    table: TokenTable,
    ids: list[int],
    skip_special: bool,
    context: list[int] | None = None,
    shown_special: tuple[str, ...] = (),
) -> str:
    decoder = new_decoder(table, skip_special, True, shown_special)
    for token_id in context or []:
        decoder.push(token_id)
    return "".join(decoder.push(token_id) for token_id in ids) + decoder.flush()


def test_tokenizer_families_are_detected(
    byte_tokenizer: Tokenizer, sentence_tokenizer: Tokenizer, metaspace_tokenizer: Tokenizer, word_tokenizer: Tokenizer
) -> None:
    tokenizers = (byte_tokenizer, sentence_tokenizer, metaspace_tokenizer, word_tokenizer)
    assert [table_of(t).decoding.kind for t in tokenizers] == [
        TokenKind.BYTES,
        TokenKind.PIECES,
        TokenKind.PIECES,
        TokenKind.WINDOW,
    ]


@quick
@given(numbers=ids_strategy, skip_special=st.booleans())
def test_streaming_equals_decoding_the_whole(tokenizer: Tokenizer, numbers: list[int], skip_special: bool) -> None:
    table = table_of(tokenizer)
    ids = [n % table.vocab_size for n in numbers]
    if table.decoding.byte_fallback:
        ids = [i for i in ids if not str(tokenizer.id_to_token(i)).startswith("<0x")]
    assert streamed(table, ids, skip_special) == tokenizer.decode(ids, skip_special_tokens=skip_special)


@quick
@given(text=st.text(max_size=20))
def test_encoded_text_streams_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert streamed(table_of(tokenizer), ids, False) == tokenizer.decode(ids, skip_special_tokens=False)


@quick
@given(data=st.binary(max_size=12), tail=st.sampled_from(["", "▁the", "x"]))
def test_byte_tokens(sentence_tokenizer: Tokenizer, data: bytes, tail: str) -> None:
    """Valid runs equal tokenizers' decode; in invalid runs each lost byte is one replacement character."""
    table = table_of(sentence_tokenizer)
    ids = [sentence_tokenizer.token_to_id(f"<0x{b:02X}>") for b in data]
    ids += sentence_tokenizer.encode(tail, add_special_tokens=False).ids if tail else []
    text = streamed(table, ids, True, context=sentence_tokenizer.encode("the").ids)
    whole = sentence_tokenizer.decode(sentence_tokenizer.encode("the").ids + ids)[len("the") :]
    if "\ufffd" not in whole:
        assert text == whole
    else:
        lost = len(data) - len("".join(c for c in data.decode("utf-8", "ignore")).encode())
        assert text.count("\ufffd") == lost + data.decode("utf-8", "ignore").count("\ufffd")


def test_a_character_is_held_until_it_is_whole(byte_tokenizer: Tokenizer) -> None:
    ids = [byte_tokenizer.token_to_id(c) for c in ("ð", "Ł", "İ", "ī")]  # F0 9F 8E 89
    decoder = new_decoder(table_of(byte_tokenizer), True, True)
    assert [decoder.push(i) for i in ids] == ["", "", "", "🎉"]
    assert decoder.flush() == ""
    assert [decoder.push(i) for i in ids[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"


def test_context_decides_the_leading_space(sentence_tokenizer: Tokenizer) -> None:
    table = table_of(sentence_tokenizer)
    the, fox = (sentence_tokenizer.encode(text).ids for text in ("the", "fox"))
    assert streamed(table, fox, True) == "fox"
    assert streamed(table, fox, True, context=the) == " fox"
    bos = [sentence_tokenizer.token_to_id("<s>")]
    assert streamed(table, fox, True, context=bos) == "fox"  # a skipped token is no text before it
    assert streamed(table, fox, False, context=bos) == " fox"


def test_special_tokens_in_the_middle_of_a_character(byte_tokenizer: Tokenizer) -> None:
    first, second = (byte_tokenizer.token_to_id(c) for c in ("Ã", "©"))
    special = byte_tokenizer.token_to_id("<|im_end|>")
    assert streamed(table_of(byte_tokenizer), [first, special, second], True) == "é"
    assert streamed(table_of(byte_tokenizer), [first, special, second], False) == "\ufffd<|im_end|>\ufffd"


@quick
@given(numbers=ids_strategy, skip_special=st.booleans())
def test_special_tokens_of_a_format_are_shown(tokenizer: Tokenizer, numbers: list[int], skip_special: bool) -> None:
    table, shown = table_of(tokenizer), ("<|im_start|>", "</s>", "[CLS]", "<not a token>")
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    hidden = {i for i in special if tokenizer.id_to_token(i) not in shown} if skip_special else set()
    ids = [special[n % len(special)] if n % 3 == 0 else n % table.vocab_size for n in numbers]
    if table.decoding.byte_fallback:
        ids = [i for i in ids if not str(tokenizer.id_to_token(i)).startswith("<0x")]
    expected = tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False)
    assert streamed(table, ids, skip_special, shown_special=shown) == expected
    assert streamed(table, ids, True) == tokenizer.decode(ids, skip_special_tokens=True)


def test_tables_of_shown_tokens_are_shared_by_their_set(byte_tokenizer: Tokenizer) -> None:
    table = table_of(byte_tokenizer)
    assert table.pieces_showing(["</s>", "<s>"]) is table.pieces_showing(("<s>", "</s>"))
    assert table.pieces_showing([]) is table.pieces_without_special
    first = table.pieces_showing(["0"])
    for i in range(65):
        table.pieces_showing([str(i)])
    assert table.pieces_showing(["0"]) is not first, "64 are kept at most"


def test_unknown_ids(byte_tokenizer: Tokenizer) -> None:
    table = table_of(byte_tokenizer)
    decoder = new_decoder(table, True, True)
    for token_id in (table.vocab_size, -1):
        with pytest.raises(UnknownToken, match=str(token_id)):
            decoder.push(token_id)
    table.vocab_size += 10  # the size of the model's vocabulary
    assert decoder.push(table.vocab_size - 1) == ""
    assert table.raw(table.vocab_size - 1) == b""


def test_spaces_between_special_tokens(word_tokenizer: Tokenizer) -> None:
    cls, fox = word_tokenizer.token_to_id("[CLS]"), word_tokenizer.token_to_id("[UNK]")
    table = table_of(word_tokenizer)
    shown = [new_decoder(table, False, spaces) for spaces in (True, False)]
    assert ["".join(d.push(i) for i in (cls, cls, fox)) for d in shown] == ["[CLS] [CLS] [UNK]", "[CLS][CLS][UNK]"]


def test_raw_bytes(byte_tokenizer: Tokenizer, sentence_tokenizer: Tokenizer) -> None:
    table = table_of(byte_tokenizer)
    assert table.raw(byte_tokenizer.token_to_id("Ã")) == b"\xc3"
    assert table.raw(byte_tokenizer.token_to_id("Ġ")) == b" "
    assert table.raw(byte_tokenizer.token_to_id("<s>")) == b"<s>"
    assert table.raw(byte_tokenizer.token_to_id("<think> é")) == "<think> é".encode()
    table = table_of(sentence_tokenizer)
    assert table.raw(sentence_tokenizer.token_to_id("<0xE2>")) == b"\xe2"
    assert table.raw(sentence_tokenizer.encode("the").ids[0]).startswith(b" ")


@quick
@given(numbers=ids_strategy, skip_special=st.booleans())
def test_tokens_that_an_adapter_adds(tokenizer: Tokenizer, numbers: list[int], skip_special: bool) -> None:
    """Streaming with the model's table equals decoding by a tokenizer that has them."""
    size, own = tokenizer.get_vocab_size(), Tokenizer.from_str(tokenizer.to_str())
    own.add_tokens([HfToken("<note>", normalized=False), HfToken("<end>", special=True, normalized=False)])
    table = table_of(tokenizer).with_added(added_tokens(size), size + 2)
    ids = [n % (size + 2) if n % 3 else size + n % 2 for n in numbers]
    if table.decoding.byte_fallback:
        ids = [i for i in ids if not str(own.id_to_token(i)).startswith("<0x")]
    assert streamed(table, ids, skip_special) == own.decode(ids, skip_special_tokens=skip_special)


def test_tables_of_adapters_have_their_own_ids(byte_tokenizer: Tokenizer) -> None:
    table, size = table_of(byte_tokenizer), byte_tokenizer.get_vocab_size()
    tables = AdapterTables(table)
    plain = StreamOpen("r", 0, 0, 1, b"", b"", 0, TextOptions())
    assert tables.of(plain) is table
    opened = msgspec.structs.replace(plain, num_added_tokens=3, added_tokens=added_tokens(size))
    own = tables.of(opened)
    assert tables.of(opened) is own and own.raw(size) == b"<note>" and own.raw(size + 2) == b""
    assert own.is_special(size + 1) and not table.is_special(size + 1)
    for one, beyond in ((own, size + 3), (table, size)):
        with pytest.raises(UnknownToken):
            one.raw(beyond)
