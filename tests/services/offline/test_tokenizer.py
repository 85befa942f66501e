"""The offline tokenizer has the interface and results of transformers' tokenizer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blockyard.services.offline.tokenizer import LLMTokenizer, TemplateOptions, through_ring
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Tokenize, Tokenized
from blockyard.shared.token_ids import pack
from blockyard.shared.tokenizer_files import TokenizerFiles

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = ["The quick fox", "naïve café 🎉", "</s> one two three four five"]


@pytest.fixture
def ours(byte_tokenizer: Tokenizer) -> LLMTokenizer:
    files = TokenizerFiles(byte_tokenizer, SPECIAL, {"default": "{{ 1 }}"}, byte_tokenizer.get_vocab_size())
    return LLMTokenizer(files, "/models/m", 64, lambda conversations, how: [])


@pytest.fixture
def theirs(byte_tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, model_max_length=64, **SPECIAL)


@pytest.mark.parametrize("text", TEXTS)
def test_text_codec_and_ids(ours: LLMTokenizer, theirs: Any, text: str) -> None:
    ids = theirs.encode(text)
    assert ours.encode(text) == ours(text).input_ids == ours(text)["input_ids"] == ids
    assert ours(text).attention_mask == [1] * len(ids)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, truncation=True, max_length=3) == theirs.encode(text, truncation=True, max_length=3)
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids[1]) == theirs.decode(ids[1])
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids, True) == theirs.convert_ids_to_tokens(ids, skip_special_tokens=True)
    assert ours.convert_tokens_to_ids(ours.convert_ids_to_tokens(ids)) == ids


def test_several_texts_and_padding(ours: LLMTokenizer, theirs: Any) -> None:
    assert dict(ours(TEXTS)) == {key: rows for key, rows in theirs(TEXTS).items() if key != "token_type_ids"}
    with pytest.raises(ValueError, match="pad_token"):
        ours(TEXTS, padding=True)
    ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    for side in ("right", "left"):
        ours.padding_side = theirs.padding_side = side
        for how in ({"padding": True}, {"padding": "max_length", "max_length": 50}):
            made, expected = ours(TEXTS, **how), theirs(TEXTS, **how)
            assert (made.input_ids, made.attention_mask) == (expected["input_ids"], expected["attention_mask"])
    assert ours.batch_decode(made.input_ids, True) == theirs.batch_decode(expected["input_ids"], True)


def test_names_and_sizes(ours: LLMTokenizer, theirs: Any) -> None:
    for name in ("bos_token", "eos_token", "bos_token_id", "eos_token_id", "vocab_size", "model_max_length", "is_fast"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.pad_token, ours.pad_token_id, ours.chat_template) == (None, None, "{{ 1 }}")
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert ours.convert_tokens_to_ids("no such token") is None
    assert ours.name_or_path == "/models/m"


def test_return_tensors_is_refused(ours: LLMTokenizer) -> None:
    with pytest.raises(RequestError, match="return_tensors"):
        ours("a", return_tensors="pt")
    with pytest.raises(AttributeError, match="labels"):
        _ = ours("a").labels


def test_templates_are_rendered_by_the_ring_with_all_options() -> None:
    asked: list[Tokenize] = []

    async def tokenize(works: list[Tokenize], name: str) -> list[Tokenized]:
        asked.extend(works)
        return [Tokenized(name, pack([i, 7]), b"", text=f"text {i}") for i in range(len(works))]

    client = SimpleNamespace(tokenizer_client=SimpleNamespace(tokenize=tokenize))
    session: Any = SimpleNamespace(card=SimpleNamespace(names=["m"]), call=lambda work: asyncio.run(work(client)))
    conversations = [[{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]]
    options = TemplateOptions([{"name": "find"}], "{{ 1 }}", False, True, {"mood": "glad"})
    assert through_ring(session)(conversations, options) == [("text 0", [0, 7]), ("text 1", [1, 7])]
    assert asked == [
        Tokenize(
            "",
            "m",
            messages=msgspec.json.encode(messages),
            tools=b'[{"name":"find"}]',
            template_kwargs=b'{"mood":"glad"}',
            chat_template="{{ 1 }}",
            add_generation_prompt=False,
            continue_final_message=True,
            want_text=True,
        )
        for messages in conversations
    ]
