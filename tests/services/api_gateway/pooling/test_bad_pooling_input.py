"""Refusals of the endpoints of pooling models: each names its field, and the ring is not asked."""

import asyncio
from typing import Any

import msgspec
import pytest
from fake_pooling import CLASSIFY, EMBED, REWARD, SCORE

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import PoolingCard

BAD: list[tuple[PoolingCard, str, dict[str, Any], str, str]] = [
    (EMBED, "/v1/embeddings", {}, "input", "missing"),
    (EMBED, "/v1/embeddings", {"input": []}, "input", "empty"),
    (EMBED, "/v1/embeddings", {"input": ""}, "input", "empty"),
    (EMBED, "/v1/embeddings", {"input": [["a"]]}, "input[0][0]", "int"),
    (EMBED, "/v1/embeddings", {"input": ["a"] * 17 + [""]}, "input[17]", "empty"),
    (EMBED, "/v1/embeddings", {"input": ["a"] * 17 + [[]]}, "input[17]", "empty"),
    (EMBED, "/v1/embeddings", {"input": ["a"] * 17 + [[5, 300]]}, "input[17]", "300 is outside"),
    (EMBED, "/v1/embeddings", {"input": ["a", -1]}, "input[1]", "id among"),
    (EMBED, "/v1/embeddings", {"input": [5, -1]}, "input", "-1 is outside"),
    (EMBED, "/v1/embeddings", {"input": [5, "a"]}, "input[1]", "mixes"),
    (EMBED, "/v1/embeddings", {"input": ["a"] * 17 + [{"x": 1}]}, "input[17]", "got `object`"),
    (EMBED, "/v1/embeddings", {"input": ["a"] * 2049}, "input", "2048"),
    (EMBED, "/v1/embeddings", {"input": "a", "messages": []}, "messages", "both"),
    (EMBED, "/v1/embeddings", {"messages": [{"role": "user", "content": "a"}], "prompt_name": "q"}, "prompt_name", ""),
    (EMBED, "/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "between 1 and"),
    (EMBED, "/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions", "model's 4"),
    (EMBED, "/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions", "trained for: 2"),
    (EMBED, "/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "not built"),
    (EMBED, "/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64"),
    (EMBED, "/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not built"),
    (EMBED, "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    (EMBED, "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "at most 64"),
    (EMBED, "/v1/embeddings", {"input": "a", "truncation_side": "middle"}, "truncation_side", "middle"),
    (EMBED, "/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "it has none"),
    (EMBED, "/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "use_activation", "differ"),
    (EMBED, "/v1/embeddings", {"input": "a", "priority": 2**40}, "priority", "at most"),
    (EMBED, "/v1/embeddings", {"input": ["a", "x" * 65]}, "input[1]", "65 tokens"),
    (EMBED, "/v1/embeddings", {"input": "a", "model": "other"}, "model", "does not exist"),
    (EMBED, "/v2/embed", {"texts": ["a"], "embedding_types": ["float", "int8"]}, "embedding_types[1]", "not built"),
    (EMBED, "/v2/embed", {"texts": ["a"], "images": ["x"]}, "images", "not built"),
    (EMBED, "/v2/embed", {"texts": ["a"], "input_type": "verse"}, "input_type", "verse"),
    (EMBED, "/v2/embed", {"texts": ["a"], "output_dimension": 3}, "output_dimension", "output_dimension 3"),
    (EMBED, "/v2/embed", {"texts": ["a"], "truncate": "MIDDLE"}, "truncate", "MIDDLE"),
    (EMBED, "/v2/embed", {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]", "text alone"),
    (SCORE, "/score", {"text_1": "a"}, "text_2", "missing"),
    (SCORE, "/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries", "one field"),
    (SCORE, "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "2 texts and text_2 3"),
    (SCORE, "/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2", "one goes with many"),
    (SCORE, "/score", {"text_1": "a", "text_2": ["c", ""]}, "text_2[1]", "empty"),
    (SCORE, "/score", {"text_1": "a", "text_2": ["c", "x" * 64]}, "text_2[1]", "65 tokens"),
    (SCORE, "/score", {"text_1": "a", "text_2": "x" * 64}, "text_2", "65 tokens"),
    (SCORE, "/score", {"text_1": "a", "text_2": "c", "instruction": "rank"}, "instruction", "template"),
    (EMBED, "/score", {"text_1": "x" * 65, "text_2": ["c", "d"]}, "text_1", "65 tokens"),
    (EMBED, "/score", {"text_1": "a", "text_2": ["c", "x" * 65]}, "text_2[1]", "65 tokens"),
    (EMBED, "/score", {"text_1": ["a", "b"], "text_2": ["c", "x" * 65]}, "text_2[1]", "text_2[1] has 65 tokens"),
    *(
        (EMBED, "/rerank", texts | {limit: 9}, field, f"{field} has 65 tokens")
        for limit in ("max_tokens_per_doc", "max_tokens_per_query")
        for texts, field in (
            ({"query": "a", "documents": ["x" * 65]}, "documents[0]"),
            ({"query": "a", "documents": ["c", "x" * 65]}, "documents[1]"),
            ({"query": "x" * 65, "documents": ["c", "d"]}, "query"),
        )
    ),
    (SCORE, "/rerank", {"query": "a"}, "documents", "missing"),
    (SCORE, "/rerank", {"query": "a", "documents": []}, "documents", "empty"),
    (SCORE, "/rerank", {"query": "", "documents": ["a"]}, "query", "empty"),
    (SCORE, "/rerank", {"documents": ["a"]}, "query", "missing"),
    (SCORE, "/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1]", "empty"),
    (SCORE, "/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", "2048"),
    *(
        (SCORE, path, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "at least 1")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    (SCORE, "/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "at least 1"),
    (SCORE, "/rerank", {"query": "a", "documents": ["a", 3]}, "documents[1]", "got `int`"),
    (CLASSIFY, "/pooling", {"input": "a", "dimensions": 2}, "dimensions", "classify"),
    (CLASSIFY, "/pooling", {"input": "a", "normalize": True}, "normalize", "classify"),
    (CLASSIFY, "/pooling", {"input": "a", "task": "token_classify"}, "task", "one of each token"),
    (REWARD, "/pooling", {"input": "a", "task": "classify"}, "task", "reward"),
    (EMBED, "/pooling", {"input": "a", "task": "token_classify"}, "task", "embed"),
    (CLASSIFY, "/pooling", {"input": "a", "task": "token_embed"}, "task", "one of each token"),
    (CLASSIFY, "/pooling", {"input": "a", "task": "embed"}, "task", "classify"),
    (CLASSIFY, "/pooling", {"input": "a", "task": "paint"}, "task", "paint"),
    (CLASSIFY, "/pooling", {"input": "a", "data": {"x": 1}}, "data", "not built"),
]


@pytest.mark.parametrize(("card", "path", "body", "field", "said"), BAD)
async def test_a_bad_field_is_named(
    pooling_rig, card: PoolingCard, path: str, body: Any, field: str, said: str
) -> None:
    async with pooling_rig(card) as (r, _):
        status, answer = await r.post(path, body)
    assert status in (400, 404), answer
    assert answer["error"]["param"] == field and said in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (rb'{"input": ["a", "b\ud800c"]}', "input[1]"),
        (rb'{"input": "\udc00"}', "input"),
        (rb'{"input": "\ud83d\ude00", "user": "\ud83d"}', "user"),
    ],
)
async def test_half_of_a_surrogate_pair_is_named(pooling_rig, text: bytes, field: str) -> None:
    async with pooling_rig(EMBED) as (r, _):
        status, answer = await r.post("/v1/embeddings", text)
    assert status == 400 and answer["error"]["param"] == field, answer
    assert "surrogate" in answer["error"]["message"]


async def test_dimensions_without_training_name_the_override(pooling_rig) -> None:
    async with pooling_rig(msgspec.structs.replace(EMBED, dimensions=[])) as (r, _):
        status, answer = await r.post("/v1/embeddings", {"input": "a", "dimensions": 2})
    assert status == 400 and """--hf-overrides '{"is_matryoshka": true}'""" in answer["error"]["message"]
    async with pooling_rig(msgspec.structs.replace(EMBED, dimensions=[], is_matryoshka=True)) as (r, _):
        status, answer = await r.post("/v1/embeddings", {"input": "a", "dimensions": 3})
    assert status == 200 and len(answer["data"][0]["embedding"]) == 3


TEXTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v2/embed": {"texts": ["a"]},
    "/score": {"text_1": "a", "text_2": "a"},
    "/v2/rerank": {"query": "a", "documents": ["a"]},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
}


PAIR = {"text_1": "a b", "text_2": ["a", "b"]}
RANK = {"query": "a b", "documents": ["a", "b"]}
TURN = {"messages": [{"role": "user", "content": "a"}]}
INVOCATIONS: list[tuple[PoolingCard, dict[str, Any], str]] = [
    (EMBED, {"input": "a"}, "/v1/embeddings"),
    (EMBED, {"input": "a", "prompt": None, "encoding_format": "base64"}, "/v1/embeddings"),
    (EMBED, TURN, "/v1/embeddings"),
    (EMBED, PAIR, "/score"),
    (EMBED, RANK, "/rerank"),
    (SCORE, {"queries": "a b", "documents": ["a"]}, "/score"),
    (SCORE, RANK | {"model": "tiny"}, "/rerank"),
    (SCORE, {"input": "a"}, "/pooling"),
    (CLASSIFY, {"input": "a"}, "/classify"),
    (REWARD, {"input": "a"}, "/pooling"),
]


@pytest.mark.parametrize(("card", "body", "path"), INVOCATIONS)
async def test_invocations_are_for_what_the_model_serves(
    pooling_rig, card: PoolingCard, body: dict[str, Any], path: str
) -> None:
    async with pooling_rig(card) as (r, _):
        [invoked, asked] = [await r.post(one, body | {"request_id": "x"}) for one in ("/invocations", path)]
    assert invoked[0] == asked[0] == 200
    kept = [{name: value for name, value in answer.items() if name != "created"} for _, answer in (invoked, asked)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("card", "body", "field"),
    [
        (EMBED, {"prompt": "a"}, "model"),
        (EMBED, {}, "input"),
        (EMBED, {"input": None, "query": None}, "input"),
        (CLASSIFY, PAIR, "model"),
        (REWARD, RANK, "model"),
    ],
)
async def test_an_invocation_for_nothing_that_is_served_names_what_is(
    pooling_rig, card: PoolingCard, body: dict[str, Any], field: str
) -> None:
    async with pooling_rig(card) as (r, _):
        status, answer = await r.post("/invocations", body)
    assert (status, answer["error"]["param"]) == (400, field)
    assert "it serves" in answer["error"]["message"] and "/pooling" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("card", "served"),
    [
        (EMBED, {"/v1/embeddings", "/v2/embed", "/score", "/v2/rerank", "/pooling"}),
        (SCORE, {"/score", "/v2/rerank", "/pooling"}),
        (CLASSIFY, {"/classify", "/pooling"}),
        (REWARD, {"/pooling"}),
        (msgspec.structs.replace(EMBED, of_tokens=True), {"/pooling"}),
        (msgspec.structs.replace(CLASSIFY, of_tokens=True), {"/pooling"}),
        (None, {"/v1/completions", "/v1/chat/completions", "/v1/responses"}),
    ],
    ids=["embed", "score", "classify", "reward", "embed tokens", "classify tokens", "generate"],
)
async def test_a_call_for_another_task_says_what_the_model_serves(pooling_rig, card: Any, served: set[str]) -> None:
    async with pooling_rig(card) as (r, _):
        answers = {path: await r.post(path, body) for path, body in TEXTS.items()}
    assert {path for path, (status, _) in answers.items() if status == 200} == served
    for path, (status, answer) in answers.items():
        if path not in served:
            error = answer["error"]
            assert (status, error["param"], error["code"]) == (400, "model", "unsupported_task"), path
            assert all(one in error["message"] for one in served)


async def test_a_pooling_model_is_healthy_without_a_detokenizer(rig, pooling_rig) -> None:
    async with pooling_rig(EMBED) as (r, _):
        r.ring.lose(4)
        assert (await r.http.get("/health")).status == (await r.http.get("/ready")).status == 200
    async with rig() as r:
        r.ring.lose(4)
        assert (await r.http.get("/health")).status == 503


async def test_a_client_that_leaves_drops_its_request(pooling_rig) -> None:
    async with pooling_rig(EMBED) as (r, fake):
        fake.answers.clear()
        asking = asyncio.create_task(r.post("/v1/embeddings", {"input": "a"}))
        await r.until(lambda: bool(fake.calls))
        assert (await (await r.http.get("/load")).json())["server_load"] == 1
        asking.cancel()
        await r.until(lambda: fake.num_dropped == 1)
        await r.until(lambda: r.gateway.pipeline.num_active == 0)


async def test_an_operator_aborts_and_the_ring_refuses(pooling_rig) -> None:
    async with pooling_rig(EMBED, max_num_queued_reqs=1) as (r, fake):
        fake.answers.clear()
        asked = {"input": ["a", "b"], "request_id": "mine"}
        asking = asyncio.create_task(r.post("/v1/embeddings", asked))
        await r.until(lambda: bool(fake.calls))
        full, _ = await r.post("/v1/embeddings", {"input": ["a"] * 3})
        _, aborted = await r.post("/abort_requests", {"request_ids": ["embd-mine"]})
        status, answer = await asking
        assert (full, aborted["num_aborted"], status) == (429, 1, 499)
        assert answer["error"]["code"] == "request_aborted" and fake.num_dropped == 1
        fake.answers.set()
        fake.error = RequestError("full", status=429, retry_after_s=2.0)
        async with r.http.post("/v1/embeddings", json={"input": "a"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "2")


async def test_a_call_counts_as_one_and_its_tokens_until_it_has_results(pooling_rig) -> None:
    async with pooling_rig(EMBED, max_num_queued_reqs=3, max_num_queued_tokens=5) as (r, fake):
        fake.answers.clear()
        open_ones = []
        for text in ("ab", "abc"):
            open_ones.append(asyncio.create_task(r.post("/v1/embeddings", {"input": [text]})))
            await r.until(lambda: len(fake.calls) == len(open_ones))
        assert (await r.post("/v1/embeddings", {"input": "x"}))[0] == 429
        fake.answers.set()
        assert [(await each)[0] for each in open_ones] == [200, 200]
        assert (await r.post("/v1/embeddings", {"input": ["x"] * 2048}))[0] == 200
