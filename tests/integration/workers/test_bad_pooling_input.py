"""Endpoints and bad input of pooling models over HTTP, behind a real ring, whose worker is the mock: each call is
answered, and the ring serves the next one."""

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from rig import serve
from sentence_folders import SPECIAL, WORDS, make_tokenizer, save_sentence_folder
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling

VOCAB, MOST = len(SPECIAL) + len(WORDS), 2048
LONG = "ab " * 100
CLASSIFIER = {
    "architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": VOCAB, "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
EMBED, SCORE, CLASSIFY = "embed", "score", "classify"
ALL = {
    "/v1/embeddings": {"input": ["ab", "cd"]},
    "/v2/embed": {"texts": ["ab", "cd"]},
    "/score": {"text_1": "ab", "text_2": ["ab", "cd"]},
    "/v1/score": {"text_1": ["ab", "cd"], "text_2": ["ab", "cd"]},
    "/rerank": {"query": "ab", "documents": ["ab", {"text": "cd"}]},
    "/v1/rerank": {"query": "ab", "documents": ["ab", "cd"], "top_n": 1},
    "/v2/rerank": {"query": "ab", "documents": ["ab", "cd"], "top_n": 5},
    "/classify": {"input": ["ab", "cd"]},
    "/pooling": {"input": ["ab", [5, 6]]},
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
}
OF_PAIRS = {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
SERVED = {
    EMBED: {"/v1/embeddings", "/v2/embed", "/pooling", *OF_PAIRS},
    SCORE: {"/pooling", *OF_PAIRS},
    CLASSIFY: {"/classify", "/pooling"},
}
BAD: list[tuple[str, str, dict[str, Any], str]] = [
    (EMBED, "/v1/embeddings", {"input": []}, "input"),
    (EMBED, "/v1/embeddings", {"input": ""}, "input"),
    (EMBED, "/v1/embeddings", {"input": [*["ab"] * 17, ""]}, "input[17]"),
    (EMBED, "/v1/embeddings", {"input": [*["ab"] * 17, LONG]}, "input[17]"),
    (EMBED, "/v1/embeddings", {"input": LONG}, "input"),
    (EMBED, "/v1/embeddings", {"input": [*["ab"] * 17, [5] * 65]}, "input[17]"),
    (EMBED, "/v1/embeddings", {"input": ["ab"] * (MOST + 1)}, "input"),
    (EMBED, "/v1/embeddings", {"input": [[5], [VOCAB]]}, "input[1]"),
    (EMBED, "/v1/embeddings", {"input": [[5], [1 << 40]]}, "input[1]"),
    (EMBED, "/v1/embeddings", {"input": ["ab", "  "], "add_special_tokens": False}, "input[1]"),
    (EMBED, "/v1/embeddings", {"input": "ab", "dimensions": 16}, "dimensions"),
    (EMBED, "/v1/embeddings", {"input": "ab", "dimensions": 0}, "dimensions"),
    (EMBED, "/v1/embeddings", {"input": "ab", "prompt_name": "verse"}, "prompt_name"),
    (EMBED, "/v1/embeddings", {"input": ["ab", "\ud800"]}, "input[1]"),
    (EMBED, "/v2/embed", {"texts": []}, "texts"),
    (EMBED, "/v2/embed", {"texts": ["ab", LONG], "truncate": "NONE"}, "texts[1]"),
    (EMBED, "/v2/embed", {"texts": ["ab"], "embedding_types": ["int8"]}, "embedding_types[0]"),
    (EMBED, "/pooling", {"input": ["ab"], "task": "classify"}, "task"),
    (EMBED, "/score", {"text_1": ["ab", "cd"], "text_2": ["ab"]}, "text_2"),
    (EMBED, "/score", {"text_1": "ab", "text_2": ["ab", LONG]}, "text_2[1]"),
    (SCORE, "/score", {"text_1": "ab", "text_2": ["ab", LONG]}, "text_2[1]"),
    (SCORE, "/score", {"text_1": ["ab", "\udc00"], "text_2": ["ab", "cd"]}, "text_1[1]"),
    (SCORE, "/rerank", {"query": "ab", "documents": ["ab"], "top_n": 0}, "top_n"),
    (SCORE, "/rerank", {"query": "ab", "documents": ["ab", ""]}, "documents[1]"),
    (SCORE, "/rerank", {"query": LONG, "documents": ["ab", "ab"]}, "query"),
    (SCORE, "/rerank", {"query": "ab", "documents": ["ab"] * (MOST + 1)}, "documents"),
    (SCORE, "/pooling", {"input": "ab", "dimensions": 2}, "dimensions"),
    (CLASSIFY, "/classify", {"input": ["ab", LONG]}, "input[1]"),
    (CLASSIFY, "/classify", {"input": [[5], [VOCAB]]}, "input[1]"),
    (CLASSIFY, "/pooling", {"input": "ab", "normalize": True}, "normalize"),
]


@pytest.fixture(scope="module", params=[EMBED, SCORE, CLASSIFY])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The task and the address of a server."""
    task, folder = request.param, tmp_path_factory.mktemp("models") / "m"
    if task == EMBED:
        save_sentence_folder(folder, Pooling(32, "mean"), Normalize())
    else:
        make_tokenizer().save_pretrained(folder)
        labels = {str(i): f"label {i}" for i in range(1 if task == SCORE else 3)}
        (folder / "config.json").write_text(json.dumps(CLASSIFIER | {"id2label": labels}))
    flags = ("--served-model-name", "m", "--device", "cpu", "--worker-cls", "mock")
    with serve(str(folder), *flags) as server:
        yield task, server.url


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Sends halves of surrogate pairs as JSON has them, escaped."""
    data = json.dumps({"model": "m"} | body)
    return client.post(path, content=data, headers={"content-type": "application/json"})


def test_each_endpoint_is_served_or_says_what_is(served: tuple[str, str]) -> None:
    task, url = served
    with httpx.Client(base_url=url) as client:
        [model] = client.get("/v1/models").json()["data"]
        answers = {path: post(client, path, body) for path, body in ALL.items()}
    assert (model["task"], model["width"]) == (task, {EMBED: 32, SCORE: 1, CLASSIFY: 3}[task])
    assert {path for path, answer in answers.items() if answer.status_code == 200} == SERVED[task]
    for path, answer in answers.items():
        if path in SERVED[task]:
            found = answer.json()
            rows = found.get("data") or found.get("results") or found["embeddings"]["float"]
            assert len(rows) == (1 if path == "/v1/rerank" else 2), found
        else:
            assert answer.status_code == 400 and f"has the task {task}" in answer.json()["error"]["message"]


def test_bad_input_is_named_and_good_input_is_served_behind_it(served: tuple[str, str]) -> None:
    task, url = served
    good = "/classify" if task == CLASSIFY else "/score" if task == SCORE else "/v1/embeddings"
    with httpx.Client(base_url=url) as client:
        for _, path, body, field in (one for one in BAD if one[0] == task):
            answer = post(client, path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (body, answer.text)
        assert post(client, good, ALL[good]).status_code == 200


def test_a_client_that_leaves_halfway_leaves_nothing_behind(served: tuple[str, str]) -> None:
    task, url = served
    texts = ["ab " * 50] * MOST
    body = {"text_1": "ab", "text_2": texts} if task == SCORE else {"input": texts}
    path = "/score" if task == SCORE else "/pooling"
    asked = json.dumps({"model": "m"} | body).encode()
    for _ in range(3):
        leaving = HTTPConnection(url.removeprefix("http://"))
        leaving.request("POST", path, asked, {"Content-Type": "application/json"})
        leaving.close()
    with httpx.Client(base_url=url) as client:
        assert post(client, path, body).status_code == 200
        deadline = time.monotonic() + 10
        while any(not line.endswith(" 0.0") for line in open_requests(client)):
            assert time.monotonic() < deadline, open_requests(client)
            time.sleep(0.1)


def open_requests(client: httpx.Client) -> list[str]:
    """The lines of /metrics that count requests; what ended a moment ago may still be counted."""
    gauges = [line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:num_requests_")]
    assert gauges
    return gauges
