"""Rerankers that compare the logits of two tokens: as users override config.json, and by a LogitScore module."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_model import load_model, run_causal
from sentence_folders import make_tokenizer
from tiny_checkpoint import LLAMA, Tiny
from tiny_poolers import hidden_and_outputs
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockyard.services.gpu_worker.loading.classifier_tokens import TOKEN_IDS, settle_classifier
from blockyard.shared.errors import ConfigError

PASTED = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["ab", "ad"],
    "is_original_qwen3_reranker": True,
}


def test_tokens_of_overrides(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for name in ("Qwen3ForSequenceClassification", "Qwen3ForCausalLM"):
        found = settle_classifier(PASTED | {"architectures": [name]}, tmp_path, tmp_path)
        assert found["architectures"] == ["Qwen3ForSequenceClassification"]
        assert found[TOKEN_IDS] == tokenizer.convert_tokens_to_ids(["ab", "ad"])
        assert found["num_labels"] == 1


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        *((tokens, "one or two tokens") for tokens in ([], "ab", [1, 2], ["ab", "ac", "ad"])),
        (["ab", "nope"], "'nope' is not a token"),
    ],
)
def test_refuses(tokens: Any, words: str, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        settle_classifier(PASTED | {"classifier_from_token": tokens}, tmp_path, tmp_path)


def test_one_token_as_for_bge_reranker_v2_gemma(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    pasted = {"architectures": ["GemmaForSequenceClassification"], "classifier_from_token": ["ad"]}
    for method in ({}, {"method": "no_post_processing"}):
        found = settle_classifier(pasted | method, tmp_path, tmp_path)
        assert found[TOKEN_IDS] == [make_tokenizer().convert_tokens_to_ids("ad")]
    with pytest.raises(ConfigError, match=r"method 'from_2_way_softmax': with .* \['ad'\] it is no_post_processing"):
        settle_classifier(pasted | {"method": "from_2_way_softmax"}, tmp_path, tmp_path)


def test_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*tokenizer\.json"):
        settle_classifier(PASTED, tmp_path, tmp_path)


@pytest.mark.parametrize("false_id", [5, None])
def test_a_folder_with_a_logit_score(false_id: int | None, tmp_path: Path) -> None:
    theirs = Tiny("reranker", Qwen3Config, Qwen3ForCausalLM, LLAMA | {"head_dim": 16}).save(tmp_path)
    modules = [("", "sentence_transformers.base.modules.transformer.Transformer")]
    modules += [("1_LogitScore", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore")]
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "1_LogitScore").mkdir()
    score = {"true_token_id": 9, "false_token_id": false_id}
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    config = json.loads((tmp_path / "config.json").read_text())
    settled = settle_classifier(config, tmp_path, tmp_path)
    assert settled["architectures"] == ["Qwen3ForSequenceClassification"]
    ours = load_model(tmp_path, overrides=json.dumps(settled))
    ids = [3, 8, 20, 7, 100]
    logits = hidden_and_outputs(theirs, ids)[1][0, -1]
    got = ours.logits(run_causal(ours, ids, [5])[-1:])[0, 0]
    expected = logits[9] if false_id is None else logits[9] - logits[false_id]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_other_models_stay_as_they_are(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"]}
    assert settle_classifier(config, tmp_path, tmp_path) is config
