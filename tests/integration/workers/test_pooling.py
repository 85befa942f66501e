"""Pooling models behind a real ring: a cross-encoder with pairs, and a decoder whose prompts are computed in chunks."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pooling_ring import PoolingRing, pooling_ring
from sentence_folders import SPECIAL, WORDS, make_tokenizer
from sentence_transformers import CrossEncoder
from transformers import BertConfig, BertForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Control, ControlVerb, PoolingParams, PoolingTask
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, TextPair
from blockyard.shared.ring_client.pooling.text_jobs import MANY_BYTES

RNG = np.random.default_rng(7)
VOCAB = len(SPECIAL) + len(WORDS)


def words(count: int) -> str:
    return " ".join(RNG.choice(WORDS, count))


TEXTS = [words(int(n)) for n in RNG.integers(1, 58, 30)]


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PoolingRing, CrossEncoder]]:
    folder = tmp_path_factory.mktemp("models") / "cross"
    torch.manual_seed(11)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.3, num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with pooling_ring(folder, "--tool-call-parser", "hermes", "--enable-sleep-mode", log=folder.parent / "log") as ring:
        yield ring, CrossEncoder(str(folder), device="cpu")


def test_scores_of_pairs_with_their_types(cross_encoder: tuple[PoolingRing, CrossEncoder]) -> None:
    ring, theirs = cross_encoder
    card = ring.pooling
    assert (card.task, card.width, card.labels, card.takes_pairs, card.has_types, card.has_kv) == (
        PoolingTask.SCORE, 1, ["LABEL_0"], True, True, False,
    )  # fmt: skip
    pairs = [TextPair(words(9), text) for text in TEXTS]
    got = ring.vectors(pairs, truncate_prompt_tokens=-1)
    expected = theirs.predict([tuple(pair) for pair in pairs])
    np.testing.assert_allclose(got[:, 0], expected, atol=1e-5)
    logits = ring.vectors(pairs[:3], truncate_prompt_tokens=-1, params=PoolingParams(use_activation=False))
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[:, 0])), expected[:3], atol=1e-5)


def test_limits_of_both_sides(cross_encoder: tuple[PoolingRing, CrossEncoder]) -> None:
    ring, _ = cross_encoder
    query, document = words(20), words(50)
    cut = TextPair(" ".join(query.split()[:4]), " ".join(document.split()[:8]))
    answer = ring.pool([TextPair(query, document)], max_first_tokens=4, max_second_tokens=8)
    assert answer.items[0].num_tokens == 4 + 8 + 3
    np.testing.assert_allclose(answer.items[0].data, ring.vectors([cut])[0], atol=1e-6)
    left = ring.pool([document], truncate_prompt_tokens=10, truncation_side="left")
    np.testing.assert_allclose(left.items[0].data, ring.vectors([" ".join(document.split()[-8:])])[0], atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "fields", "field"),
    [
        ([], {}, "input"),
        (["aa", ""], {}, "input[1]"),
        (["aa", "aa " * 80], {}, "input[1]"),
        (["aa", "\ud800"], {}, "input[1]"),
        (["aa", [1, VOCAB]], {}, "input[1]"),
        (["aa", []], {}, "input[1]"),
        ([TextPair("aa", "aa " * 80)], {"second_field": "documents"}, "documents[0]"),
        ([TextPair("aa", "")], {"second_field": "documents"}, "documents[0]"),
        (["aa"], {"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        (["aa"], {"truncation_side": "up"}, "truncation_side"),
        (["aa"], {"prompt_name": "query"}, "prompt_name"),
        (["aa"], {"params": PoolingParams(dimensions=8)}, "dimensions"),
        (["aa"], {"params": PoolingParams(task=PoolingTask.EMBED)}, "model"),
        (["aa"], {"params": PoolingParams(pooling_type="median")}, "pooling_type"),
    ],
)
def test_what_is_refused(
    cross_encoder: tuple[PoolingRing, CrossEncoder], inputs: list[str], fields: dict[str, object], field: str
) -> None:
    ring, _ = cross_encoder
    with pytest.raises(RequestError) as caught:
        ring.pool(inputs, **fields)
    assert (caught.value.field, caught.value.status) == (field, 400), caught.value


def test_a_call_that_is_sent_in_parts(cross_encoder: tuple[PoolingRing, CrossEncoder]) -> None:
    """Each result is at the place of its text, and an error names the text of a later part."""
    ring, _ = cross_encoder
    order = RNG.integers(0, len(TEXTS), 2 * MANY_BYTES // (sum(map(len, TEXTS)) // len(TEXTS)))
    many = [TEXTS[i] for i in order]
    np.testing.assert_allclose(ring.vectors(many), ring.vectors(TEXTS)[order], atol=1e-6)
    with pytest.raises(RequestError) as caught:
        ring.pool([*many, "aa " * 80])
    assert caught.value.field == f"input[{len(many)}]"


@pytest.mark.parametrize("level", [1, 2])
def test_texts_wait_while_the_worker_sleeps(cross_encoder: tuple[PoolingRing, CrossEncoder], level: int) -> None:
    ring, _ = cross_encoder
    before = ring.vectors(TEXTS)

    async def asleep(client: RingClient) -> PooledAnswer:
        await client.controls.ask(Control("", ControlVerb.SLEEP, level=level))
        waits = asyncio.ensure_future(client.pooling.pool(ring.call(TEXTS)))
        await asyncio.sleep(0.1)
        assert not waits.done()
        await client.controls.ask(Control("", ControlVerb.WAKE_UP))
        return await waits

    found = np.stack([item.data for item in ring.run(asleep).items])
    np.testing.assert_allclose(found, before, atol=1e-6)


def test_flags_of_decoding_are_named(cross_encoder: tuple[PoolingRing, CrossEncoder]) -> None:
    ring, _ = cross_encoder
    log = ring.log.read_text()
    assert "--tool-call-parser: no effect with the task score\n" in log
    assert "pooling: CLS (default of the model), 1 number, not normalized" in log


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PoolingRing, Qwen3ForCausalLM]]:
    folder = tmp_path_factory.mktemp("models") / "decoder"
    torch.manual_seed(12)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=48, max_position_embeddings=64, initializer_range=0.3, is_matryoshka=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    flags = (
        "--task",
        "embed",
        "--max-num-batched-tokens",
        "24",
        "--max-num-seqs",
        "8",
        "--num-gpu-blocks-override",
        "14",
    )
    with pooling_ring(folder, *flags, "--block-size", "8", log=folder.parent / "log") as ring:
        yield ring, model


def hidden_of(model: Qwen3ForCausalLM, text: str) -> torch.Tensor:
    ids = torch.tensor([make_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        return model.model(ids).last_hidden_state[0]


def test_a_decoder_in_chunks_with_few_blocks(decoder: tuple[PoolingRing, Qwen3ForCausalLM]) -> None:
    ring, model = decoder
    expected = torch.stack([hidden_of(model, text)[-1] for text in TEXTS])
    expected = torch.nn.functional.normalize(expected, dim=-1)
    np.testing.assert_allclose(ring.vectors(TEXTS), expected.numpy(), atol=1e-4)
    np.testing.assert_allclose(ring.vectors(TEXTS), expected.numpy(), atol=1e-4)  # behind cached prefixes


def test_what_a_request_says_goes_before_the_model(decoder: tuple[PoolingRing, Qwen3ForCausalLM]) -> None:
    ring, model = decoder
    states = [hidden_of(model, text) for text in TEXTS]
    mean = ring.vectors(TEXTS, params=PoolingParams(pooling_type="mean", normalize=False))
    np.testing.assert_allclose(mean, torch.stack([one.mean(0) for one in states]).numpy(), atol=1e-4)
    cut = ring.vectors(TEXTS, params=PoolingParams(dimensions=8))
    expected = torch.nn.functional.normalize(torch.stack([one[-1, :8] for one in states]), dim=-1)
    np.testing.assert_allclose(cut, expected.numpy(), atol=1e-4)
    answer = ring.pool(TEXTS[:3], params=PoolingParams(pooling_type="all", normalize=False))
    for item, one in zip(answer.items, states, strict=False):
        np.testing.assert_allclose(item.data, one.numpy(), atol=1e-4)
        assert item.shape == (item.num_tokens, 32)


def test_cached_tokens_are_counted_for_each_text(decoder: tuple[PoolingRing, Qwen3ForCausalLM]) -> None:
    ring, _ = decoder
    text, other = words(41), words(3)
    ring.pool([text])
    answer = ring.pool([text, other])
    assert [item.cached_tokens for item in answer.items] == [40, 0]
    assert answer.cached_tokens == 40
    mean = ring.pool([text], params=PoolingParams(pooling_type="mean"))
    assert mean.cached_tokens == 0, "a mean needs the hidden states of all tokens"


def test_ids_and_texts_in_one_call(decoder: tuple[PoolingRing, Qwen3ForCausalLM]) -> None:
    ring, _ = decoder
    ids = make_tokenizer()(TEXTS[0])["input_ids"]
    one, other, longest = ring.vectors([TEXTS[0], ids, [7] * 64])
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.isfinite(longest).all()
