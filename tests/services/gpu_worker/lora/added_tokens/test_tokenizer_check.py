"""Tokenizers in folders of adapters, written by transformers."""

import json
from pathlib import Path

import pytest
from demo_training.adapter_styles import MODEL
from transformers import AutoTokenizer

from blockyard.services.gpu_worker.lora.added_tokens.tokenizer_check import TokenizerCheck
from blockyard.shared import tokenizer_files
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


def test_a_tokenizer_is_loaded_once_for_folders_with_the_same_files(
    check: TokenizerCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers save the model's tokenizer beside each adapter, and reading one takes longer than the weights."""
    loaded: list[Path] = []
    load = tokenizer_files.load
    monkeypatch.setattr(tokenizer_files, "load", lambda path: (loaded.append(path), load(path))[1])
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((MODEL / name).read_bytes())
        (folder / "chat_template.jinja").write_text("{{ messages[1].content }}")
    first, second = (check.read(tmp_path / name) for name in "ab")
    assert first is not None and first == second and loaded.count(tmp_path / "a") == 1
    assert tmp_path / "b" not in loaded
    templates = tmp_path / "b" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    other = check.read(tmp_path / "b")
    assert other is not None and other.digest != first.digest


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
