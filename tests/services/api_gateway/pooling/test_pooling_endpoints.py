"""Answers of the endpoints of pooling models, over a real socket, with the ring client's pooling faked."""

import base64
import struct
from typing import Any

import msgspec
import pytest
from fake_pooling import CLASSIFY, EMBED, REWARD, SCORE, vector_of

from blockyard.shared.messages import NamedPrompt, PoolingTask
from blockyard.shared.token_ids import pack

PROMPTS = [NamedPrompt("query", "query: "), NamedPrompt("passage", "passage: ")]


def unpacked(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


async def test_embeddings_of_texts_ids_and_lists_of_both(pooling_rig) -> None:
    async with pooling_rig(EMBED) as (r, fake):
        status, one = await r.post("/v1/embeddings", {"model": "tiny", "input": "abc"})
        assert status == 200, one
        _, ids = await r.post("/v1/embeddings", {"input": [97, 98, 99], "user": "u", "priority": -3})
        _, many = await r.post("/v1/embeddings", {"input": ["abc", [97, 98, 99], "d"], "encoding_format": "base64"})
    assert one["object"] == "list" and one["model"] == "tiny" and one["id"].startswith("embd-")
    assert one["data"] == [{"index": 0, "embedding": vector_of("abc"), "object": "embedding"}]
    assert one["usage"]["prompt_tokens"] == one["usage"]["total_tokens"] == 3
    assert ids["data"] == one["data"]
    assert [unpacked(d["embedding"]) for d in many["data"]] == [vector_of("abc"), vector_of("abc"), vector_of("d")]
    assert [call.is_single for call in fake.calls] == [True, True, False]
    assert fake.calls[1].inputs == [pack([97, 98, 99])] and (fake.calls[1].user, fake.calls[1].priority) == ("u", -3)
    assert fake.calls[0].params.task is PoolingTask.EMBED
    assert one["usage"]["prompt_tokens_details"] is None


async def test_usage_has_cached_tokens_by_flag(pooling_rig) -> None:
    async with pooling_rig(EMBED, enable_prompt_tokens_details=True) as (r, _):
        _, answer = await r.post("/v1/embeddings", {"input": ["abcd", "ef"]})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 + 1}


async def test_fields_of_an_embedding_reach_the_ring(pooling_rig) -> None:
    card = msgspec.structs.replace(EMBED, prompts=PROMPTS)
    asked = {
        "input": "abc",
        "dimensions": 2,
        "normalize": False,
        "truncate_prompt_tokens": -1,
        "truncation_side": "left",
        "add_special_tokens": False,
        "prompt_name": "query",
        "cache_salt": "s",
    }
    async with pooling_rig(card) as (r, fake):
        status, answer = await r.post("/v1/embeddings", asked)
    assert status == 200 and len(answer["data"][0]["embedding"]) == 2
    [call] = fake.calls
    assert (call.params.dimensions, call.params.normalize) == (2, False)
    assert (call.truncate_prompt_tokens, call.truncation_side, call.add_special_tokens) == (-1, "left", False)
    assert (call.prompt_name, call.cache_salt) == ("query", "s")


async def test_an_embedding_of_messages(pooling_rig) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    async with pooling_rig(EMBED) as (r, fake):
        status, answer = await r.post("/v1/embeddings", asked)
        refused, error = await r.post("/v1/embeddings", {"messages": [{"role": "user", "content": "x" * 100}]})
        cut, _ = await r.post(
            "/v1/embeddings", {"messages": [{"role": "user", "content": "x" * 100}], "truncate_prompt_tokens": -1}
        )
    assert status == 200 and len(answer["data"]) == 1
    assert isinstance(fake.calls[0].inputs[0], bytes) and fake.calls[0].field == "messages"
    assert refused == 400 and error["error"]["param"] == "messages" and cut == 200


async def test_messages_with_special_tokens_are_cut_as_a_text(pooling_rig) -> None:
    """No prompt of the model goes before them: the template has written the text."""
    card = msgspec.structs.replace(EMBED, prompts=PROMPTS, default_prompt_name="query")
    asked = {"messages": [{"role": "user", "content": "x" * 100}], "truncate_prompt_tokens": 9}
    async with pooling_rig(card) as (r, fake):
        for special in (True, False):
            status, _ = await r.post("/v1/embeddings", asked | {"add_special_tokens": special})
            assert status == 200
    text, ids = (call.inputs[0] for call in fake.calls)
    assert isinstance(text, str) and "x" * 100 in text and isinstance(ids, bytes)
    assert [call.prompt_name for call in fake.calls] == ["", ""]


async def test_messages_where_the_chat_template_writes_texts(pooling_rig) -> None:
    """They are written once: what the template made goes to the ring as ids, which it would not write again."""
    card = msgspec.structs.replace(EMBED, writes_messages=True, prompts=PROMPTS, default_prompt_name="query")
    messages = [{"role": "user", "content": "hi"}]
    async with pooling_rig(card) as (r, fake):
        for more in ({}, {"truncate_prompt_tokens": 9}, {"truncate_prompt_tokens": -1, "add_special_tokens": True}):
            status, answer = await r.post("/v1/embeddings", {"messages": messages} | more)
            assert status == 200, answer
        assert (await r.post("/pooling", {"messages": messages}))[0] == 200
    assert all(isinstance(call.inputs[0], bytes) and call.prompt_name == "" for call in fake.calls)
    assert len(fake.calls) == 4 and len({call.inputs[0] for call in fake.calls}) == 1


async def test_a_request_pools_in_its_own_way(pooling_rig) -> None:
    asked = {"input": "abc", "pooling_type": "step", "step_tag_id": 5, "returned_token_ids": [1, 0]}
    async with pooling_rig(REWARD) as (r, fake):
        status, _ = await r.post("/pooling", asked)
        for field, value in (("pooling_type", "median"), ("step_tag_id", -1), ("returned_token_ids", [2])):
            refused, answer = await r.post("/pooling", asked | {field: value})
            assert (refused, answer["error"]["param"]) == (400, field)
    [call] = fake.calls
    params = call.params
    assert (status, params.pooling_type, params.step_tag_id, params.returned_token_ids) == (200, "step", 5, [1, 0])


async def test_vectors_of_tokens_by_the_name_of_the_task(pooling_rig) -> None:
    asked = {"input": "abc", "task": "token_embed"}
    async with pooling_rig(EMBED) as (r, fake):
        for more in ({}, {"pooling_type": "all"}):
            assert (await r.post("/pooling", asked | more))[0] == 200
        refused, error = await r.post("/pooling", asked | {"pooling_type": "cls"})
    assert [call.params.pooling_type for call in fake.calls] == ["ALL", "ALL"]
    assert refused == 400 and error["error"]["param"] == "pooling_type"
    async with pooling_rig(msgspec.structs.replace(EMBED, of_tokens=True, pooling="ALL")) as (r, fake):
        assert (await r.post("/pooling", asked))[0] == 200
    assert fake.calls[0].params.pooling_type is None


async def test_cohere_embeddings(pooling_rig) -> None:
    card = msgspec.structs.replace(EMBED, prompts=PROMPTS)
    asked: dict[str, Any] = {"model": "tiny", "texts": ["abc", "d"], "input_type": "search_query"}
    async with pooling_rig(card) as (r, fake):
        _, answer = await r.post("/v2/embed", asked | {"embedding_types": ["float", "base64"]})
        inputs = [{"content": [{"type": "text", "text": "abc"}]}]
        _, of_inputs = await r.post("/v2/embed", {"inputs": inputs, "input_type": "search_document"})
        _, cut = await r.post("/v2/embed", {"texts": ["x" * 100], "max_tokens": 10, "truncate": "START"})
        status, error = await r.post("/v2/embed", {"texts": ["a", "x" * 100], "truncate": "NONE"})
    assert answer["embeddings"]["float"] == [vector_of("abc"), vector_of("d")]
    assert [unpacked(text) for text in answer["embeddings"]["base64"]] == answer["embeddings"]["float"]
    assert answer["texts"] == ["abc", "d"] and answer["response_type"] == "embeddings_by_type"
    assert answer["meta"]["billed_units"] == {"input_tokens": 4}
    assert list(of_inputs["embeddings"]) == ["float"]
    assert [call.prompt_name for call in fake.calls] == ["query", "passage", None, None]
    assert cut["meta"]["tokens"] == {"input_tokens": 10} and fake.calls[2].truncation_side == "left"
    assert status == 400 and error["error"]["param"] == "texts[1]"


async def test_documents_for_cohere_where_queries_alone_have_a_prompt(pooling_rig) -> None:
    card = msgspec.structs.replace(EMBED, prompts=[NamedPrompt("query", "query: ")])
    async with pooling_rig(card) as (r, fake):
        for input_type in ("search_query", "search_document"):
            status, _ = await r.post("/v2/embed", {"texts": ["abc"], "input_type": input_type})
            assert status == 200
        status, error = await r.post("/v2/embed", {"texts": ["abc"], "input_type": "clustering"})
    assert [call.prompt_name for call in fake.calls] == ["query", None]
    assert status == 400 and error["error"]["param"] == "input_type"


async def test_scores_of_a_cross_encoder(pooling_rig) -> None:
    async with pooling_rig(SCORE) as (r, fake):
        _, one_to_many = await r.post("/score", {"text_1": "a b", "text_2": ["a", "b a", "c"]})
        _, many = await r.post("/v1/score", {"queries": ["a", "b"], "documents": ["a", "a"], "use_activation": False})
        _, one = await r.post("/score", {"data_1": "a", "data_2": "a"})
    assert [d["score"] for d in one_to_many["data"]] == [0.5, 1.0, 0.0]
    assert one_to_many["data"][1] == {"index": 1, "score": 1.0, "object": "score"}
    assert [d["score"] for d in many["data"]] == [1.0, 0.0] and len(one["data"]) == 1
    assert [call.params.use_activation for call in fake.calls] == [None, False, None]
    assert fake.calls[0].params.task is PoolingTask.SCORE and fake.calls[0].inputs[1] == ("a b", "b a")


async def test_scores_of_vectors_are_their_similarity(pooling_rig) -> None:
    found = {}
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        async with pooling_rig(msgspec.structs.replace(EMBED, similarity=name)) as (r, fake):
            _, answer = await r.post("/score", {"text_1": "query", "text_2": ["query", "some text"]})
        found[name] = [d["score"] for d in answer["data"]]
        assert fake.calls[0].inputs == ["query", "query", "some text"]  # the query is computed once
        assert answer["usage"]["total_tokens"] == len("queryquerysome text")
    a, b = vector_of("query"), vector_of("some text")
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norms = sum(x * x for x in a) ** 0.5 * sum(x * x for x in b) ** 0.5
    assert found["cosine"] == pytest.approx([1, dot / norms], abs=1e-6)
    assert found["dot"][1] == pytest.approx(dot, rel=1e-6)
    assert found["euclidean"] == pytest.approx([0, -(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5)])
    assert found["manhattan"] == pytest.approx([0, -sum(abs(x - y) for x, y in zip(a, b, strict=True))])


async def test_rerank_sorts_and_cuts(pooling_rig) -> None:
    documents = ["c", "a b", {"text": "b"}, "b"]
    async with pooling_rig(SCORE) as (r, fake):
        _, whole = await r.post("/rerank", {"model": "tiny", "query": "a b", "documents": documents})
        _, top = await r.post(
            "/v2/rerank",
            {
                "query": "a b",
                "documents": documents,
                "top_n": 2,
                "return_documents": False,
                "max_tokens_per_doc": 9,
                "max_tokens_per_query": 5,
            },
        )
        _, most = await r.post("/v1/rerank", {"query": "a b", "documents": documents, "top_n": 100})
    assert [(one["index"], one["relevance_score"]) for one in whole["results"]] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.5),
        (0, 0.0),
    ]
    assert [one["document"]["text"] for one in whole["results"]] == ["a b", "b", "b", "c"]
    assert top["results"] == [{"index": 1, "relevance_score": 1.0}, {"index": 2, "relevance_score": 0.5}]
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] == 4 * 3 + 6
    assert whole["meta"]["billed_units"] == {"search_units": 1} and len(most["results"]) == 4
    assert (fake.calls[1].max_first_tokens, fake.calls[1].max_second_tokens) == (5, 9)


async def test_rerank_by_vectors_limits_query_and_documents_apart(pooling_rig) -> None:
    async with pooling_rig(EMBED) as (r, fake):
        asked = {"query": "abc", "documents": ["xyz", "abc"], "max_tokens_per_doc": 9, "max_tokens_per_query": 5}
        _, answer = await r.post("/rerank", asked)
    assert [one["index"] for one in answer["results"]] == [1, 0]
    assert [(call.inputs, call.max_first_tokens) for call in fake.calls] == [(["abc"], 5), (["xyz", "abc"], 9)]


@pytest.mark.parametrize(("max_len", "limit"), [(64, None), (8192, 4096)])
async def test_long_documents_for_cohere_are_cut(pooling_rig, max_len: int, limit: int | None) -> None:
    """To `max_tokens_per_doc`, of which Cohere documents the default, and to the model's length."""
    async with pooling_rig(msgspec.structs.replace(SCORE, max_len=max_len)) as (r, fake):
        asked = {"query": "a", "documents": ["c", "x " * max_len]}
        status, answer = await r.post("/v2/rerank", asked)
        assert status == 200 and len(answer["results"]) == 2, answer
        await r.post("/v2/rerank", asked | {"max_tokens_per_doc": 7, "truncate_prompt_tokens": 20})
        refused, error = await r.post("/v1/rerank", asked)
    assert [(call.truncate_prompt_tokens, call.max_second_tokens) for call in fake.calls[:2]] == [(-1, limit), (20, 7)]
    assert refused == 400 and error["error"]["param"] == "documents[1]"


async def test_classes(pooling_rig) -> None:
    async with pooling_rig(CLASSIFY) as (r, fake):
        _, answer = await r.post("/classify", {"input": ["good film", "bad"]})
        _, logits = await r.post("/classify", {"input": "good film", "use_activation": False})
    assert answer["data"][1] == {"index": 1, "label": "so-so", "probs": [0.25, 0.5, 0.25], "num_classes": 3}
    assert answer["id"].startswith("classify-") and answer["usage"]["total_tokens"] == 12
    assert logits["data"][0]["probs"] == [-1.0, 2.0, -1.0]
    assert fake.calls[0].params.task is PoolingTask.CLASSIFY


async def test_pooling_returns_any_shape(pooling_rig) -> None:
    async with pooling_rig(REWARD) as (r, _):
        status, answer = await r.post("/pooling", {"input": ["ab", "c"]})
        _, encoded = await r.post("/pooling", {"input": "ab", "encoding_format": "base64", "task": "reward"})
    assert status == 200
    assert [d["data"] for d in answer["data"]] == [[[0.0, 1.0], [1.0, 1.0]], [[0.0, 1.0]]]
    assert answer["data"][0]["object"] == "pooling" and unpacked(encoded["data"][0]["data"]) == [0, 1, 1, 1]
    async with pooling_rig(CLASSIFY) as (r, fake):
        _, answer = await r.post("/pooling", {"input": "ab"})
    assert answer["data"][0]["data"] == [0.25, 0.5, 0.25] and fake.calls[0].params.task is PoolingTask.ENCODE


async def test_a_large_body_is_read_in_its_own_process(pooling_rig) -> None:
    texts = [f"{i} {'x' * 50}" for i in range(2000)]
    async with pooling_rig(EMBED) as (r, fake):
        status, answer = await r.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"})
        assert status == 200 and r.gateway.body_parser.process is not None
        refused, error = await r.post("/v1/embeddings", {"input": [*texts[:1700], ""]})
    assert len(answer["data"]) == 2000 and fake.calls[0].inputs == texts
    assert (refused, error["error"]["param"]) == (400, "input[1700]")
    assert unpacked(answer["data"][1999]["embedding"]) == vector_of(texts[1999])
