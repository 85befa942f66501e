"""Folders with modules of sentence-transformers, and a reward model, behind a real ring."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from pooling_ring import pooling_ring
from reward_folders import save_reward_model
from rig import serve
from sentence_folders import SPECIAL, WORDS, make_tokenizer, save_sentence_folder
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from blockyard import LLM
from blockyard import PoolingParams as AskedPooling
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import PoolingParams, PoolingTask
from blockyard.shared.ring_client.pooling.calls import TextPair

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


def test_dense_layers_behind_the_rows_of_tokens(tmp_path: Path) -> None:
    """Each row goes through them, by the flag as by a request."""
    torch.manual_seed(2)
    theirs = save_sentence_folder(tmp_path / "m", Pooling(32, "mean"), Dense(32, 20), Normalize())
    [rows] = theirs.encode(TEXTS[:1], output_value="token_embeddings")
    with torch.no_grad():
        expected = torch.nn.functional.normalize(theirs[2]({"sentence_embedding": rows})["sentence_embedding"], dim=-1)
    with pooling_ring(tmp_path / "m", log=tmp_path / "log") as ring:
        asked = ring.vectors(TEXTS[:1], params=PoolingParams(pooling_type="ALL"))[0]
    flags = ("--override-pooler-config", '{"pooling_type": "ALL"}')
    with pooling_ring(tmp_path / "m", *flags, log=tmp_path / "log") as ring:
        assert ring.pooling.width == 20
        for found in (asked, ring.vectors(TEXTS[:1])[0]):
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_a_folder_whose_chat_template_writes_texts(tmp_path: Path) -> None:
    """sentence-transformers saves one of each language model with a chat template. A prompt is the system's message."""
    torch.manual_seed(6)
    base, folder = tmp_path / "base", tmp_path / "m"
    Qwen3Model(Qwen3Config(head_dim=16, **DECODER)).save_pretrained(base)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}aa {{ one.role[:1] }} {{ one.content }} ba {% endfor %}"
    tokenizer.save_pretrained(base)
    modules = [Transformer(str(base)), Pooling(32, "mean", include_prompt=False), Normalize()]
    theirs = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "ca da ", "passage": "ea "})
    theirs.save(str(folder), create_model_card=False)
    with pooling_ring(folder, log=tmp_path / "log") as ring:
        for name in (None, "query"):
            got = ring.vectors(TEXTS, prompt_name=name)
            np.testing.assert_allclose(got, theirs.encode(TEXTS, prompt_name=name), atol=1e-5)
    assert "texts: written as messages by the chat template" in (tmp_path / "log").read_text()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="there is none; --chat-template"), pooling_ring(folder, log=tmp_path / "log"):
        pass


def test_a_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """As older releases of sentence-transformers write it. The other modules, prompts and settings lie around it."""
    torch.manual_seed(7)
    folder = tmp_path / "m"
    save_sentence_folder(folder, Pooling(32, "mean"), Dense(32, 20), Normalize(), prompts={"query": "ca da "})
    inside = folder / "0_Transformer"
    inside.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        if path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inside / path.name)
    entries = json.loads((folder / "modules.json").read_text())
    entries[0]["path"] = inside.name
    (folder / "modules.json").write_text(json.dumps(entries))
    theirs = SentenceTransformer(str(folder), device="cpu")
    with pooling_ring(folder, log=tmp_path / "log") as ring:
        got = ring.vectors(TEXTS, prompt_name="query")
    np.testing.assert_allclose(got, theirs.encode(TEXTS, prompt_name="query"), atol=1e-5)


def test_the_default_prompt_of_a_cross_encoder(tmp_path: Path) -> None:
    """It goes before the first text of a pair."""
    torch.manual_seed(5)
    sizes = {"num_labels": 1, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=DECODER["vocab_size"], intermediate_size=48, max_position_embeddings=64, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "plain")
    make_tokenizer().save_pretrained(tmp_path / "plain")
    prompts = {"prompts": {"web": "ab ac ad "}, "default_prompt_name": "web"}
    theirs = CrossEncoder(str(tmp_path / "plain"), device="cpu", **prompts)
    theirs.save_pretrained(str(tmp_path / "m"), create_model_card=False)
    pairs = [TextPair(TEXTS[0], text) for text in TEXTS[1:]]
    with pooling_ring(tmp_path / "m", log=tmp_path / "log") as ring:
        got = ring.vectors(pairs, truncate_prompt_tokens=-1)[:, 0]
    np.testing.assert_allclose(got, theirs.predict([tuple(pair) for pair in pairs]), atol=1e-5)


def test_a_folder_with_a_logit_score(tmp_path: Path) -> None:
    """The rows of two tokens of the head are a classifier; the function of its logit is applied once.

    The tokenizer joins a pair unless the folder has messages: no template is built in for such folders.
    """
    torch.manual_seed(3)
    base, folder = tmp_path / "base", tmp_path / "m"
    Qwen3ForCausalLM(Qwen3Config(head_dim=16, **DECODER)).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    transformer = Transformer(str(base), transformer_task="text-generation", processor_kwargs={"padding_side": "left"})
    theirs = CrossEncoder(modules=[transformer, LogitScore(true_token_id=9, false_token_id=5)], device="cpu")
    theirs.save_pretrained(str(folder), create_model_card=False)
    (folder / "chat_template.jinja").write_text("{{ query }} ba {{ document }}")
    pairs = [TextPair(TEXTS[0], text) for text in TEXTS]
    with pooling_ring(folder, log=tmp_path / "log") as ring:
        assert (ring.pooling.task, ring.pooling.width) == (PoolingTask.SCORE, 1)
        assert not ring.pooling.has_pair_template
        got = ring.vectors(pairs, truncate_prompt_tokens=-1)[:, 0]
    for one in (theirs, CrossEncoder(str(folder), device="cpu")):
        np.testing.assert_allclose(got, one.predict([tuple(pair) for pair in pairs]), atol=1e-5)


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


def test_rewards_in_llm(tmp_path: Path) -> None:
    """Qwen2ForProcessRewardModel: of each token, unless the request names the one that ends a step."""
    reference = save_reward_model(tmp_path / "m", "Qwen2ForProcessRewardModel", vocab_size=DECODER["vocab_size"])
    make_tokenizer().save_pretrained(tmp_path / "m")
    tag = int(make_tokenizer().convert_tokens_to_ids(WORDS[7]))
    texts = [*TEXTS, f"ab {WORDS[7]} ba {WORDS[7]}"]
    with LLM(str(tmp_path / "m"), device="cpu", dtype="float32", log_level="warning") as llm:
        outputs = llm.reward(texts, use_tqdm=False)
        steps = llm.reward(texts, pooling_params=AskedPooling(step_tag_id=tag), use_tqdm=False)
        good = llm.encode(texts, AskedPooling(returned_token_ids=[1], softmax=False), use_tqdm=False)
        for one, of_steps, of_good in zip(outputs, steps, good, strict=True):
            logits, ids = reference(one.prompt_token_ids), np.array(one.prompt_token_ids)
            expected = logits.softmax(-1).numpy()
            assert one.outputs.data.shape == (len(ids), 2)
            np.testing.assert_allclose(one.outputs.data, expected, atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(of_steps.outputs.data, expected[ids == tag], atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(of_good.outputs.data, logits[:, 1:], atol=1e-4, rtol=1e-4)
        assert len(steps[-1].outputs.data) == 2
        for field, value in (("returned_token_ids", []), ("step_tag_id", -1)):
            with pytest.raises(ValueError, match=field):
                llm.reward(texts, pooling_params=AskedPooling(**{field: value}), use_tqdm=False)
        with pytest.raises(ValueError, match="has the task reward"):
            llm.embed(TEXTS, use_tqdm=False)


def test_rewards_of_steps_over_http(tmp_path: Path) -> None:
    """Qwen2ForProcessRewardModel: probabilities of bad and good at the token that ends a step."""
    folder, tokenizer = tmp_path / "m", make_tokenizer()
    reference = save_reward_model(folder, "Qwen2ForProcessRewardModel", vocab_size=DECODER["vocab_size"])
    tokenizer.save_pretrained(folder)
    steps = [f"ab ac {WORDS[7]} ba be bf {WORDS[7]}", "ca cb"]
    tag = tokenizer.convert_tokens_to_ids(WORDS[7])
    flags = ("--override-pooler-config", json.dumps({"pooling_type": "STEP", "step_tag_id": tag}))
    served = ("--model", str(folder), "--served-model-name", "m", "--device", "cpu", "--dtype", "float32")
    with serve(*served, *flags) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post("/pooling", json={"model": "m", "input": steps, "encoding_format": "float"})
        assert answer.status_code == 200, answer.text
        refused = http.post("/v1/embeddings", json={"model": "m", "input": steps})
    assert refused.status_code == 400 and "has the task reward" in refused.json()["error"]["message"]
    for text, found in zip(steps, answer.json()["data"], strict=True):
        ids = tokenizer(text)["input_ids"]
        expected = reference(ids).softmax(-1)[[i for i, one in enumerate(ids) if one == tag]]
        assert np.shape(found["data"]) in (expected.shape, (0,)), "a text without steps has no numbers"
        np.testing.assert_allclose(np.reshape(found["data"], (-1, 2)), expected, atol=1e-4, rtol=1e-4)
