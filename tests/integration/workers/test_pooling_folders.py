"""Folders with modules of sentence-transformers, and a reward model, behind a real ring."""

import json
from pathlib import Path

import numpy as np
import torch
from pooling_ring import pooling_ring
from sentence_folders import SPECIAL, WORDS, make_tokenizer, save_sentence_folder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from blockyard.shared.messages import PoolingParams, PoolingTask

RNG = np.random.default_rng(9)
TEXTS = [" ".join(RNG.choice(WORDS, int(n))) for n in RNG.integers(1, 50, 12)]
DECODER = {
    "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0,
}  # fmt: skip


def test_dense_layers_behind_another_pooling(tmp_path: Path) -> None:
    """--override-pooler-config changes the pooling, and not what is behind it; a request goes before both."""
    torch.manual_seed(2)
    theirs = save_sentence_folder(tmp_path / "m", Pooling(32, "cls"), Dense(32, 20), Normalize())
    for mode in ("mean", "lasttoken"):
        theirs[1] = Pooling(32, mode)
        expected = theirs.encode(TEXTS)
        if mode == "mean":
            flags = ("--override-pooler-config", '{"pooling_type": "MEAN"}')
            with pooling_ring(tmp_path / "m", *flags, log=tmp_path / "log") as ring:
                np.testing.assert_allclose(ring.vectors(TEXTS), expected, atol=1e-5)
                asked = ring.vectors(TEXTS, params=PoolingParams(pooling_type="last"))
        else:
            np.testing.assert_allclose(asked, expected, atol=1e-5)
    assert "pooling: MEAN (--override-pooler-config)" in (tmp_path / "log").read_text()


def test_a_folder_with_a_logit_score(tmp_path: Path) -> None:
    """The rows of two tokens of the head are a classifier; the function of its logit is applied once."""
    torch.manual_seed(3)
    folder, theirs = tmp_path / "m", Qwen3ForCausalLM(Qwen3Config(head_dim=16, **DECODER)).eval()
    theirs.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    kinds = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(zip(("", "1_LogitScore"), kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 9, "false_token_id": 5}')
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            logits = theirs(torch.tensor([make_tokenizer()(text)["input_ids"]])).logits[0, -1]
        expected.append(float((logits[9] - logits[5]).sigmoid()))
    with pooling_ring(folder, log=tmp_path / "log") as ring:
        assert (ring.pooling.task, ring.pooling.width) == (PoolingTask.SCORE, 1)
        np.testing.assert_allclose(ring.vectors(TEXTS)[:, 0], expected, atol=1e-5)


def test_a_reward_model(tmp_path: Path) -> None:
    """Rewards are logits. Each text has that of its last token."""
    torch.manual_seed(4)
    folder, theirs = tmp_path / "m", Qwen2ForSequenceClassification(Qwen2Config(num_labels=1, **DECODER)).eval()
    theirs.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with torch.no_grad():
        expected = [float(theirs(torch.tensor([make_tokenizer()(text)["input_ids"]])).logits) for text in TEXTS]
    with pooling_ring(folder, "--task", "reward", log=tmp_path / "log") as ring:
        assert ring.pooling.task is PoolingTask.REWARD
        np.testing.assert_allclose(ring.vectors(TEXTS)[:, 0], expected, atol=1e-4)
