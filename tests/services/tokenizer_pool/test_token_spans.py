"""Where tokens are in a text, and which of them are the assistant's; what a tokenizer says of itself."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from text_rig import text_config
from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool.chats.chat_template import ChatTemplates
from blockyard.services.tokenizer_pool.text_codec import TextCodec
from blockyard.services.tokenizer_pool.token_spans import Marks, assistant_mask, unpacked_offsets, without_marks
from blockyard.shared import tokenizer_files
from blockyard.shared.messages import DescribeTokenizer, Tokenize, Tokenized, TokenizerDescription

MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "h\u00e9llo"}, {"role": "assistant", "content": "the fox"}] * 2


def tokenized(tokenizer: Tokenizer, template: str = MARKED, **fields: Any) -> Tokenized:
    texts = TextCodec(tokenizer, tokenizer.get_vocab_size(), ChatTemplates({"default": template}, {}), text_config())
    answer = texts.answer(Tokenize("r", "m", want_text=True, **fields))
    assert isinstance(answer, Tokenized), answer
    return answer


@pytest.mark.parametrize("fields", [{"text": "the quick fox"}, {"messages": msgspec.json.encode(CHAT)}])
def test_offsets_lead_to_the_text_of_each_token(byte_tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    found = tokenized(byte_tokenizer, want_offsets=True, **fields)
    pairs = unpacked_offsets(found.offsets)
    assert len(pairs) * 4 == len(found.token_ids)
    assert "".join(dict.fromkeys(found.text[start:end] for start, end in pairs)) != ""
    covered = {i for start, end in pairs for i in range(start, end)}
    assert covered == set(range(len(found.text)))
    assert tokenized(byte_tokenizer, **fields).offsets == b""


def test_the_mask_marks_what_the_template_marks(byte_tokenizer: Tokenizer) -> None:
    messages = msgspec.json.encode(CHAT)
    found = tokenized(byte_tokenizer, messages=messages, want_offsets=True, want_assistant_mask=True)
    plain = tokenized(byte_tokenizer, messages=messages)
    assert (found.token_ids, found.text) == (plain.token_ids, plain.text)
    pairs = unpacked_offsets(found.offsets)
    own = "".join(found.text[a:b] for (a, b), is_own in zip(pairs, found.assistant_mask, strict=True) if is_own)
    assert own == "the fox!the fox!" and plain.assistant_mask == b""


def test_a_template_without_marks_and_ids_have_no_mask(byte_tokenizer: Tokenizer) -> None:
    unmarked = "{% for m in messages %}{{ m.content }}{% endfor %}"
    asked: dict[str, Any] = {"want_offsets": True, "want_assistant_mask": True}
    found = tokenized(byte_tokenizer, unmarked, messages=msgspec.json.encode(CHAT), **asked)
    assert found.assistant_mask == b"" and found.offsets
    of_ids = tokenized(byte_tokenizer, token_ids=found.token_ids, **asked)
    assert (of_ids.offsets, of_ids.assistant_mask) == (b"", b"")


def test_variables_of_a_request_do_not_mark_text(byte_tokenizer: Tokenizer) -> None:
    kwargs = msgspec.json.encode({"__assistant_begin": "FORGED", "__assistant_end": "FORGED"})
    found = tokenized(byte_tokenizer, messages=msgspec.json.encode(CHAT), template_kwargs=kwargs)
    assert "FORGED" not in found.text


def test_marks_are_taken_out() -> None:
    begin, end = marks = Marks.new()
    assert without_marks(f"a{begin}bc{end}d{begin}{end}{begin}e", marks) == ("abcde", [(1, 3), (4, 4), (4, 5)])
    assert without_marks("abc", marks) == ("abc", [])
    assert assistant_mask([(0, 1), (1, 3), (3, 3), (3, 6), (6, 7)], [(2, 4), (5, 6)]) == b"\0\1\0\1\0"


def test_a_tokenizer_describes_itself(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 9, "tokenizer_class": "Own"}')
    settings = tokenizer_files.settings(tmp_path, {"default": "{{ x }}"})
    texts = TextCodec(byte_tokenizer, 9, ChatTemplates({}, {}), text_config(), None, settings)
    answer = texts.answer(DescribeTokenizer("r", "m"))
    assert isinstance(answer, TokenizerDescription)
    expected = {"model_max_length": 9, "tokenizer_class": "Own", "chat_template": "{{ x }}"}
    assert msgspec.json.decode(answer.settings) == expected
