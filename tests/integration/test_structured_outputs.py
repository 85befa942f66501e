"""Structured output through every service: each spelling of the API, what is refused, and a matcher process killed."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from rig import Server, serve

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["list", "set"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA, "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "Describe a list of numbers."}]


@pytest.fixture(scope="module")
def ring() -> Iterator[Server]:
    with serve("demo", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(ring: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 300, "seed": 3, "temperature": 1.0} | fields
    return client.chat.completions.create(**asked)


def test_answers_validate_alone_streamed_and_as_choices(client: openai.OpenAI) -> None:
    answer = chat(client, response_format=FORMAT, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3, texts
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    parts = chat(client, response_format=FORMAT, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == texts[0]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, {"x", "yy"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, {"x", "yy"}),
        ({"guided_choice": ["left", "right"], "guided_decoding_backend": "xgrammar"}, {"left", "right"}),
        ({"guided_regex": "no|yes", "ignore_eos": True, "min_tokens": 20}, {"no", "yes"}),
    ],
)
def test_other_grammars(client: openai.OpenAI, fields: dict[str, Any], allowed: set[str]) -> None:
    prompt = "def f("
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=40, temperature=1, n=4, seed=1, extra_body=fields
    )
    assert {choice.text for choice in answer.choices} <= allowed
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_json_object_ends_by_itself(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=2000, temperature=0.5)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


def test_log_probabilities_are_those_of_the_raw_logits(client: openai.OpenAI) -> None:
    answer = chat(client, extra_body={"guided_choice": ["zebra"]}, logprobs=True, top_logprobs=2, max_tokens=20)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content).startswith("zebra")
    assert content[0].logprob < -2  # the model alone would not begin with it


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, "schema"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "use_beam_search": True, "temperature": 0}, "guided_regex"),
        ({"logits_processors": ["os.system"]}, "logits_processors"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    started = time.monotonic()
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, seed=None, temperature=fields.pop("temperature", 1), extra_body=fields)
    assert param in (caught.value.param or "")
    assert time.monotonic() - started < 10


def matcher_processes(server: Server) -> list[int]:
    """Process ids of the matchers of the server's worker."""
    worker = next(pid for name, pid in server.children().items() if "gpu_worker" in name)
    children: set[int] = {worker}
    found = []
    stats = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
    for pid, stat in sorted(stats.items()):
        if int(stat.rpartition(")")[2].split()[1]) in children:
            children.add(pid)
            if b"matcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_no_text_changes_when_the_matcher_is_killed(ring: Server, client: openai.OpenAI) -> None:
    seeds = range(6)
    undisturbed = [chat(client, response_format=FORMAT, seed=seed).choices[0].message.content for seed in seeds]
    texts: dict[int, str] = {}

    def ask(seed: int) -> None:
        with openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none", max_retries=0) as own:
            texts[seed] = chat(own, response_format=FORMAT, seed=seed).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    before = matcher_processes(ring)
    assert before
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert [texts.get(seed) for seed in seeds] == undisturbed
    assert set(matcher_processes(ring)).isdisjoint(before)
