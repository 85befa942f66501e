"""Text workers encode prompts of an adapter with the tokenizer in its folder."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from text_rig import TextRig, text_rig
from tokenizers import AddedToken, Tokenizer

from blockyard.shared.messages import (
    AdapterTokenizer,
    Detokenize,
    Detokenized,
    TextRejected,
    Tokenize,
    Tokenized,
)
from blockyard.shared.token_ids import pack, unpack

MESSAGES = b'[{"role": "user", "content": "fox"}]'


@pytest.fixture(scope="module")
def size(byte_tokenizer: Tokenizer) -> int:
    return int(byte_tokenizer.get_vocab_size())


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer, size: int) -> Iterator[TextRig]:
    with text_rig(tmp_path_factory.mktemp("model"), byte_tokenizer) as rig:
        rig.workers.set_model(size, 64)
        yield rig


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> AdapterTokenizer:
    folder = tmp_path_factory.mktemp("adapter")
    tokenizer = Tokenizer.from_str(byte_tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<note>", normalized=False), AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (folder / "chat_template.jinja").write_text("<note>{{ messages[0].content }}")
    return AdapterTokenizer(str(folder), b"1", 2)


def test_its_tokens_template_and_end(rig: TextRig, adapter: AdapterTokenizer, size: int) -> None:
    [found] = rig.ask(Tokenize("1", "m", text="<note>", add_special_tokens=False, adapter=adapter))
    assert isinstance(found, Tokenized) and (unpack(found.token_ids), found.eos_token_ids) == ([size], [size + 1])
    [found] = rig.ask(Tokenize("1", "m", text="<note>", add_special_tokens=False))
    assert isinstance(found, Tokenized) and size not in unpack(found.token_ids) and not found.eos_token_ids
    [found] = rig.ask(Tokenize("1", "m", messages=MESSAGES, want_text=True, adapter=adapter))
    assert isinstance(found, Tokenized) and found.text == "<note>fox" and unpack(found.token_ids)[0] == size
    [text] = rig.ask(Detokenize("1", "m", pack([size, size + 1]), adapter=adapter))
    assert text == Detokenized("1", "<note><end>")


def test_ids_are_checked_against_its_vocabulary(rig: TextRig, adapter: AdapterTokenizer, size: int) -> None:
    """Also if it has no tokenizer of its own. An end that the model has no row for is none."""
    plain = msgspec.structs.replace(adapter, path="")
    for given, is_valid in ((None, False), (adapter, True), (plain, True)):
        [found] = rig.ask(Tokenize("1", "m", token_ids=pack([5, size + 1]), adapter=given))
        assert isinstance(found, Tokenized if is_valid else TextRejected)
    [found] = rig.ask(Tokenize("1", "m", token_ids=pack([5, size + 2]), adapter=adapter))
    assert isinstance(found, TextRejected) and found.field == "prompt"
    fewer = msgspec.structs.replace(adapter, num_added_tokens=1)
    [found] = rig.ask(Tokenize("1", "m", text="<note>", adapter=fewer))
    assert isinstance(found, Tokenized) and not found.eos_token_ids


def test_a_folder_that_is_gone_is_an_answer(rig: TextRig, adapter: AdapterTokenizer, tmp_path: Path) -> None:
    gone = AdapterTokenizer(str(tmp_path / "gone"), b"2", 2)
    workers = rig.settle()
    [found] = rig.ask(Tokenize("1", "m", text="x", adapter=gone))
    assert isinstance(found, TextRejected) and found.field == "model" and "cannot be read" in found.message
    assert str(tmp_path) not in found.message
    assert rig.settle() == workers
