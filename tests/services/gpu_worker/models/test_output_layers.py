"""Decoders with other output layers than a vocabulary's, and without one, against transformers in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_model import load_model, run_causal
from reward_folders import LABELS, save_reward_model
from tiny_checkpoint import LLAMA, VOCAB, Tiny
from tiny_poolers import BY_NAME, DECODERS, hidden_and_outputs
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockyard.shared.errors import ConfigError

IDS = np.random.default_rng(4).integers(2, VOCAB, 60).tolist()


OF_CLASSES = ("llama-classes", "qwen3-model", "qwen2-tokens")  # that run by their class in transformers, too


@pytest.mark.parametrize(
    ("tiny", "model_impl"),
    [*((tiny, "auto") for tiny in DECODERS), *((BY_NAME[name], "transformers") for name in OF_CLASSES)],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_hidden_states_and_outputs(tiny: Tiny, model_impl: str, tmp_path: Path) -> None:
    theirs = tiny.save(tmp_path)
    ours = load_model(tmp_path, model_impl=model_impl)
    assert ours.shape.has_kv
    expected, outputs = hidden_and_outputs(theirs, IDS)
    hidden = run_causal(ours, IDS, [20, 1, 39])
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    if outputs is None:
        assert ours.logits(hidden) is hidden
        return
    got = ours.logits(hidden if tiny.name.endswith("tokens") else hidden[-1:])
    torch.testing.assert_close(got, outputs.reshape(got.shape), atol=1e-4, rtol=1e-4)
    assert ours.shape.num_outputs == got.shape[1]


@pytest.mark.parametrize(
    ("name", "model_impl"), [*((name, "auto") for name in LABELS), ("Qwen2ForRewardModel", "transformers")]
)
def test_reward_models(name: str, model_impl: str, tmp_path: Path) -> None:
    """Against a plain reference: their code is in the releases, not in transformers."""
    reference = save_reward_model(tmp_path, name)
    ours = load_model(tmp_path, model_impl=model_impl)
    torch.testing.assert_close(ours.logits(run_causal(ours, IDS, [60])), reference(IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("tied", [True, False])
def test_reranker_that_compares_two_tokens(tied: bool, model_impl: str, tmp_path: Path) -> None:
    tiny = Tiny("reranker", Qwen3Config, Qwen3ForCausalLM, LLAMA | {"head_dim": 16, "tie_word_embeddings": tied})
    theirs = tiny.save(tmp_path)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
        "classifier_token_ids": [7, 9],
    }
    ours = load_model(tmp_path, overrides=json.dumps(overrides), model_impl=model_impl)
    _, outputs = hidden_and_outputs(theirs, IDS)
    got = ours.logits(run_causal(ours, IDS, [60])[-1:])
    torch.testing.assert_close(got[0, 0], outputs[0, -1, 9] - outputs[0, -1, 7], atol=1e-4, rtol=1e-4)
    assert not [name for name in ours.table.places if name.startswith("lm_head")], "the matrix is given up"


@pytest.mark.parametrize("ids", [None, [3], [7, 9999], [1, 2, 3]])
def test_tokens_of_a_reranker(ids: Any, tmp_path: Path) -> None:
    Tiny("reranker", Qwen3Config, Qwen3ForCausalLM, LLAMA | {"head_dim": 16}).save(tmp_path)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    text = json.dumps(overrides | {"classifier_token_ids": ids})
    if ids == [3]:
        assert load_model(tmp_path, overrides=text).shape.num_outputs == 1
        return
    with pytest.raises(ConfigError, match="classifier_token_ids"):
        load_model(tmp_path, overrides=text)
