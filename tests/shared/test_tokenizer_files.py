"""A folder's tokenizer compared with that of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, GPT2Tokenizer

from blockyard.shared import tokenizer_files
from blockyard.shared.errors import LoadError

TEXTS = ["def stop(text): return", " The fox  isn't 東京 🎉", "</s><pad> a", "", "x</s>"]


def write(path: Path, value: Any) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")


def vocab_and_merges(folder: Path, tokenizer: Tokenizer, specials: list[str]) -> None:
    """GPT-2's two files, with OPT's special tokens in front."""
    model = json.loads(tokenizer.to_str())["model"]
    words = [w for w in sorted(model["vocab"], key=model["vocab"].get) if w not in ("<s>", "</s>")]
    write(folder / "vocab.json", {word: n for n, word in enumerate([*specials, *words])})
    merges = [" ".join(merge) for merge in model["merges"]]
    write(folder / "merges.txt", "\n".join(["#version: 0.2", *merges, ""]))


@pytest.fixture
def opt(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    """The files of facebook/opt-125m, smaller."""
    vocab_and_merges(tmp_path, byte_tokenizer, ["<s>", "<pad>", "</s>", "<unk>"])
    end = {"content": "</s>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    end_typed = {**end, "__type": "AddedToken"}
    config = {"errors": "replace", "unk_token": end_typed, "bos_token": end_typed, "eos_token": end_typed}
    config |= {"add_prefix_space": False, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    write(tmp_path / "tokenizer_config.json", config)
    pad = {**end, "content": "<pad>"}
    write(
        tmp_path / "special_tokens_map.json", {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": pad}
    )
    write(tmp_path / "config.json", {"model_type": "opt"})
    return tmp_path


def assert_same_ids(folder: Path, reference: Any, *more: str) -> None:
    tokenizer = tokenizer_files.load(folder).tokenizer
    for text in (*TEXTS, *more):
        for special in (True, False):
            expected = reference(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=special).ids == expected, text
        ids = tokenizer.encode(text).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_opt_from_vocab_and_merges(opt: Path) -> None:
    assert_same_ids(opt, AutoTokenizer.from_pretrained(opt))
    files = tokenizer_files.load(opt)
    assert files.tokenizer.encode("a").ids[0] == 2
    assert files.special_tokens == {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}


def test_gpt2_from_vocab_and_merges(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    vocab_and_merges(tmp_path, byte_tokenizer, ["<|endoftext|>"])
    write(tmp_path / "config.json", {"model_type": "gpt2"})
    assert_same_ids(tmp_path, GPT2Tokenizer.from_pretrained(tmp_path))
    assert tokenizer_files.load(tmp_path).special_tokens["eos_token"] == "<|endoftext|>"


def test_tokenizer_json(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    word = max((w for w in byte_tokenizer.get_vocab() if w.isalpha()), key=len)  # special only by the config
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": word}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    # the file's post-processor decides, not the flag
    config |= {"add_bos_token": False, "additional_special_tokens": ["[TOOL]"]}
    write(tmp_path / "tokenizer_config.json", config)
    assert_same_ids(tmp_path, AutoTokenizer.from_pretrained(tmp_path), f"a[TOOL] b{word}")
    files = tokenizer_files.load(tmp_path)
    assert files.tokenizer.decode(files.tokenizer.encode(f"a{word}").ids) == "a"
    assert files.vocab_size == byte_tokenizer.get_vocab_size()
    assert tokenizer_files.load(tmp_path / "tokenizer.json").vocab_size == files.vocab_size


def test_flags_do_not_change_a_tokenizer_json(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    copy = Tokenizer.from_str(byte_tokenizer.to_str())
    copy.post_processor = processors.ByteLevel(trim_offsets=False)
    copy.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    write(tmp_path / "tokenizer_config.json", config)
    assert_same_ids(tmp_path, AutoTokenizer.from_pretrained(tmp_path))
    assert tokenizer_files.load(tmp_path).tokenizer.encode("a").ids != byte_tokenizer.encode("a").ids


def test_truncation_of_the_file_is_not_applied(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    copy = Tokenizer.from_str(byte_tokenizer.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    copy.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six seven"
    assert tokenizer_files.load(tmp_path).tokenizer.encode(text).ids == byte_tokenizer.encode(text).ids


def test_tokens_listed_with_their_ids(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = byte_tokenizer.get_vocab_size()
    listed = {str(size): {"content": "<new>", "special": True}, str(size + 7): {"content": "<elsewhere>"}}
    write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": listed, "pad_token": "<nowhere>"})
    tokenizer = tokenizer_files.load(tmp_path).tokenizer
    assert tokenizer.token_to_id("<new>") == size
    assert tokenizer.token_to_id("<elsewhere>") is None  # its id could not be had
    assert tokenizer.token_to_id("<nowhere>") is None  # the model has no such row


TEMPLATE_FILES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"tokenizer_config.json": {"chat_template": "A"}}, {"default": "A"}),
    (
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
            }
        },
        {"default": "A", "tool_use": "B"},
    ),
    ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.json": {"chat_template": "J"}}, {"default": "J"}),
    (
        {
            "tokenizer_config.json": {"chat_template": "A"},
            "chat_template.jinja": "F",
            "additional_chat_templates/tool_use.jinja": "T",
        },
        {"default": "F", "tool_use": "T"},
    ),
]


@pytest.mark.parametrize(("files", "templates"), TEMPLATE_FILES)
def test_where_templates_are(
    tmp_path: Path, byte_tokenizer: Tokenizer, files: dict[str, Any], templates: dict[str, str]
) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        write(tmp_path / name, content)
    assert tokenizer_files.load(tmp_path).chat_templates == templates


def test_errors_are_one_line_and_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is not a folder"):
        tokenizer_files.load(tmp_path / "nothing")
    with pytest.raises(LoadError, match=r"neither tokenizer\.json nor vocab\.json"):
        tokenizer_files.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"has tokenizer\.model but no tokenizer\.json"):
        tokenizer_files.load(tmp_path)
    for broken in ("{", "{}", '{"model": {"type": "BPE", "vocab": 3}}'):
        write(tmp_path / "tokenizer.json", broken)
        with pytest.raises(LoadError, match=r"tokenizer\.json") as error:
            tokenizer_files.load(tmp_path)
        assert "\n" not in str(error.value)
    write(tmp_path / "tokenizer_config.json", "[]")
    with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
        tokenizer_files.load(tmp_path)
    write(tmp_path / "tokenizer_config.json", "{}")
    (tmp_path / "tokenizer.json").unlink()
    write(tmp_path / "vocab.json", {"a": 0})
    write(tmp_path / "merges.txt", "a b c\n")
    with pytest.raises(LoadError, match=r"merges\.txt"):
        tokenizer_files.load(tmp_path)
