"""Tokenizers in folders of adapters, written by transformers."""

import json
from pathlib import Path

import pytest
from demo_training.adapter_styles import MODEL
from transformers import AutoTokenizer

from blockyard.services.gpu_worker.lora.added_tokens.tokenizer_check import TokenizerCheck
from blockyard.shared.messages import AddedToken


@pytest.fixture(scope="module")
def check() -> TokenizerCheck:
    return TokenizerCheck(str(MODEL))


def test_added_tokens(check: TokenizerCheck, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens(["<note>"])
    tokenizer.add_tokens(["<|reply|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    found = check.read(tmp_path)
    assert found is not None and found.digest and not found.problem
    assert found.added == [AddedToken(4096, "<note>"), AddedToken(4097, "<|reply|>", is_special=True)]


def test_the_models_own_tokenizer_is_none(check: TokenizerCheck, tmp_path: Path) -> None:
    """Another chat template makes it another one."""
    assert check.read(tmp_path) is None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    assert check.read(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = check.read(tmp_path)
    assert found is not None and (found.added, found.problem) == ([], "")


def test_other_ids_are_a_problem(check: TokenizerCheck, tmp_path: Path) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    first, second = tokenizer["added_tokens"][:2]
    first["content"], second["content"] = second["content"], first["content"]
    vocab = tokenizer["model"]["vocab"]
    vocab[first["content"]], vocab[second["content"]] = first["id"], second["id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = check.read(tmp_path)
    assert found is not None and found.problem.startswith("2 tokens have other ids")
    (tmp_path / "tokenizer.json").write_text("{")
    broken = check.read(tmp_path)
    assert broken is not None and "tokenizer.json" in broken.problem
