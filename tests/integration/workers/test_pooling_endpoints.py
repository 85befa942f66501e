"""A tiny sentence encoder as users run it, over HTTP and in `LLM`, to what sentence-transformers makes of it."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
from rig import serve
from sentence_folders import WORDS, save_sentence_folder
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling

from blockyard import LLM, PoolingParams

RNG = np.random.default_rng(5)
TEXTS = [" ".join(RNG.choice(WORDS, int(n))) for n in RNG.integers(1, 50, 80)]
PROMPTS = {"query": "ab cd "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "encoder"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> SentenceTransformer:
    return save_sentence_folder(folder, Pooling(32, "mean"), Normalize(), prompts=PROMPTS)


@pytest.fixture(scope="module")
def url(folder: Path, theirs: SentenceTransformer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--model", str(folder), "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32")
    with serve(*flags, "--batch-dir", str(tmp_path_factory.mktemp("batches"))) as server:
        yield server.url


def expected(theirs: SentenceTransformer, texts: list[str], **fields: Any) -> Any:
    return theirs.encode(texts, convert_to_numpy=True, show_progress_bar=False, **fields)


def test_clients_get_the_vectors_of_sentence_transformers(url: str, theirs: SentenceTransformer) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS)
        got = np.array([one.embedding for one in answer.data])
        np.testing.assert_allclose(got, expected(theirs, TEXTS), atol=1e-5)
        asked = client.embeddings.create(model="tiny", input=TEXTS[:3], extra_body={"prompt_name": "query"})
        queries = expected(theirs, TEXTS[:3], prompt_name="query")
        np.testing.assert_allclose([one.embedding for one in asked.data], queries, atol=1e-5)
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="tiny", input=["ab", "ab " * 100])
        assert caught.value.param == "input[1]" and caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="has the task embed") as caught:
            client.completions.create(model="tiny", prompt="ab")
    with httpx.Client() as http:
        client_of_cohere = cohere.ClientV2("none", base_url=url, httpx_client=http)
        reranked = client_of_cohere.rerank(model="tiny", query=TEXTS[0], documents=TEXTS, top_n=5)
    vectors = expected(theirs, TEXTS)
    similar = vectors @ vectors[0]
    best = np.argsort(-similar, kind="stable")[:5]
    assert reranked.results[0].index == 0
    scores = [one.relevance_score for one in reranked.results]
    np.testing.assert_allclose(scores, similar[best], atol=1e-5)


def test_a_batch_of_embeddings_and_scores(url: str, theirs: SentenceTransformer) -> None:
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for i, text in enumerate(TEXTS[:10])
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        until = time.monotonic() + 60
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < until and batch.status != "failed", batch
            time.sleep(0.1)
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    found = {one["custom_id"]: one["response"]["body"]["data"][0]["embedding"] for one in answers}
    np.testing.assert_allclose([found[str(i)] for i in range(10)], expected(theirs, TEXTS[:10]), atol=1e-5)


def test_llm(folder: Path, theirs: SentenceTransformer) -> None:
    with LLM(str(folder), device="cpu", dtype="float32", log_level="warning") as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose([one.outputs.embedding for one in outputs], expected(theirs, TEXTS), atol=1e-5)
        assert outputs[0].prompt_token_ids == theirs.tokenizer(TEXTS[0])["input_ids"]
        [pooled] = llm.encode(TEXTS[0], PoolingParams(normalize=False), use_tqdm=False)
        assert isinstance(pooled.outputs.data, np.ndarray) and pooled.outputs.data.shape == (32,)
        scores = llm.score(TEXTS[0], TEXTS[:4], use_tqdm=False)
        similar = expected(theirs, TEXTS[:4]) @ expected(theirs, TEXTS[:1])[0]
        np.testing.assert_allclose([one.outputs.score for one in scores], similar, atol=1e-5)
        with pytest.raises(ValueError, match="has the task embed"):
            llm.generate("ab")
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            llm.embed(["ab", "ab " * 100], use_tqdm=False)
