"""The official clients of OpenAI and Cohere, unmodified, against the endpoints of pooling models."""

import asyncio
from typing import Any

import cohere
import httpx
import msgspec
import openai
import pytest
from fake_pooling import EMBED, SCORE, vector_of

from blockyard.shared.messages import NamedPrompt

TEXTS = ["abc", "d"]


async def test_openai_embeddings(pooling_rig) -> None:
    async with (
        pooling_rig(EMBED) as (r, _),
        openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="k", max_retries=0) as c,
    ):
        binary = await c.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
        plain = await c.embeddings.create(model="tiny", input=TEXTS, encoding_format="float", dimensions=2)
        ids = await c.embeddings.create(model="tiny", input=[[97, 98, 99]])
        with pytest.raises(openai.BadRequestError) as caught:
            await c.embeddings.create(model="tiny", input=["a", ""])
    assert [one.embedding for one in binary.data] == [vector_of(text) for text in TEXTS]
    assert [one.embedding for one in plain.data] == [vector_of(text)[:2] for text in TEXTS]
    assert ids.data[0].embedding == vector_of("abc") and binary.usage.total_tokens == 4
    assert caught.value.param == "input[1]"


async def test_cohere_embeds_and_reranks(pooling_rig) -> None:
    card = msgspec.structs.replace(EMBED, prompts=[NamedPrompt("query", "q: ")])
    async with pooling_rig(card) as (r, fake):
        embedded = await asyncio.to_thread(_embed, r.url)
    assert embedded.embeddings.float_ == [vector_of(text) for text in TEXTS]
    assert embedded.meta.billed_units.input_tokens == 4 and fake.calls[0].prompt_name == "query"
    async with pooling_rig(SCORE) as (r, _):
        second, first, error = await asyncio.to_thread(_rerank, r.url)
    assert [(one.index, one.relevance_score) for one in second.results] == [(1, 1.0), (2, 0.5)]
    assert [(one.index, one.document.text) for one in first.results] == [(1, "a b"), (2, "b"), (0, "c")]
    assert second.meta.billed_units.search_units == 1 and "top_n" in str(error)


def _embed(url: str) -> Any:
    with httpx.Client() as http:
        client = cohere.ClientV2("key", base_url=url, httpx_client=http)
        return client.embed(model="tiny", texts=TEXTS, input_type="search_query", embedding_types=["float"])


def _rerank(url: str) -> tuple[Any, Any, Exception]:
    documents = ["c", "a b", "b"]
    with httpx.Client() as http:
        client = cohere.ClientV2("key", base_url=url, max_retries=0, httpx_client=http)
        second = client.rerank(model="tiny", query="a b", documents=documents, top_n=2)
        first = cohere.Client("key", base_url=url, httpx_client=http).rerank(
            model="tiny", query="a b", documents=[{"text": one} for one in documents], return_documents=True
        )
        with pytest.raises(cohere.BadRequestError) as caught:
            client.rerank(model="tiny", query="a b", documents=documents, top_n=0)
    return second, first, caught.value
