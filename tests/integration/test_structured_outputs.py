"""Structured output through every service: each spelling of the API, what is refused, metrics, logits processors."""

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
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


PROCESSORS = """
import torch


def only_seven(output_ids, logits):
    changed = torch.full_like(logits, float("-inf"))
    changed[7 + len(output_ids)] = 0.0
    return changed


class Only:
    def __init__(self, token):
        self.token = token

    def __call__(self, prompt_ids, output_ids, logits):
        logits[self.token] += 1e4
        return logits


def raises_at_three(output_ids, logits):
    if len(output_ids) == 3:
        raise ValueError("three tokens are too many")
    return logits
"""


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("processors")
    (folder / "my_processors.py").write_text(PROCESSORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with serve("demo", "--dtype", "float32", "--logits-processor-pattern", r"my_processors\..*") as server:
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
        ({"structured_outputs": {"choice": ["<|im_start|>user", "a <|pad|>"]}}, {"<|im_start|>user", "a <|pad|>"}),
        ({"structured_outputs": {"regex": r"(<\|im_end\|>){2}"}}, {"<|im_end|>" * 2}),
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


def completion_ids(client: openai.OpenAI, *processors: object, **fields: Any) -> list[int]:
    extra = {"logits_processors": list(processors), "return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model="demo", prompt="def f(", max_tokens=6, temperature=0, extra_body=extra | fields
    )
    ids: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return ids


DEAD_END = """start: /[a-z]{400}/ NOTHING
NOTHING: /[a-z]+/ & /[0-9]+/
"""


def test_a_grammar_that_fails_late_is_an_error_that_clients_do_not_repeat(client: openai.OpenAI) -> None:
    """The trial walk does not come to this dead end. Text that was sent is followed by an event with the error."""
    fields = {"max_tokens": 500, "extra_body": {"guided_grammar": DEAD_END, "guided_decoding_backend": "guidance"}}
    with pytest.raises(openai.BadRequestError, match="allows no token of the model here, at output token") as caught:
        chat(client, **fields)
    assert caught.value.type == "invalid_request_error"
    text = ""
    with pytest.raises(openai.APIError, match="allows no token of the model here, at output token") as caught_late:
        for event in chat(client, stream=True, **fields):
            text += event.choices[0].delta.content or ""
    assert len(text) == 400 and text.isalpha()
    assert not isinstance(caught_late.value, openai.APIStatusError)
    assert chat(client, extra_body={"guided_choice": ["still", "there"]}).choices[0].message.content in (
        "still",
        "there",
    )


def test_logits_processors_of_users(client: openai.OpenAI) -> None:
    assert completion_ids(client, "my_processors.only_seven") == [7, 8, 9, 10, 11, 12]
    assert completion_ids(client, {"qualname": "my_processors.Only", "args": [300]}) == [300] * 6
    with pytest.raises(openai.BadRequestError) as caught:
        completion_ids(client, "os.system")
    assert caught.value.param == "logits_processors" and "os.system" in str(caught.value)


def test_a_logits_processor_that_raises_fails_its_request_alone(client: openai.OpenAI) -> None:
    expected = completion_ids(client)
    with ThreadPoolExecutor(5) as threads:
        failing = [threads.submit(completion_ids, client, "my_processors.raises_at_three") for _ in range(2)]
        others = [threads.submit(completion_ids, client) for _ in range(2)]
        others.append(threads.submit(completion_ids, client, {"qualname": "my_processors.Only", "args": [300]}))
        for one in failing:
            error = one.exception()
            assert isinstance(error, openai.APIStatusError) and "my_processors.raises_at_three" in str(error)
            assert "three tokens are too many" in str(error)
        assert [one.result() for one in others] == [expected, expected, [300] * 6]
    with pytest.raises(openai.APIStatusError) as caught:
        completion_ids(client, "my_processors.missing")
    assert "my_processors.missing" in str(caught.value)


def metrics(server: Server) -> dict[str, float]:
    """Sums over all members by name, and of refused grammars by reason."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        for name in (sample.name, f"{sample.name} {sample.labels.get('reason')}"):
            found[name] = found.get(name, 0.0) + sample.value
    return found


def settled_metrics(ring: Server) -> dict[str, float]:
    """Counts travel with heartbeats: those of earlier tests are in once nothing of them changes any more."""
    names = ("blockyard:constraint_masks_total", "blockyard:constraint_first_mask_seconds_count")
    found = metrics(ring)
    for _ in range(20):
        time.sleep(1.5)
        before, found = found, metrics(ring)
        if all(name in found and found[name] == before.get(name) for name in names):
            break
    return found


def test_metrics_of_structured_output_move(ring: Server, client: openai.OpenAI) -> None:
    before = settled_metrics(ring)
    chat(client, response_format=FORMAT)
    chat(client, extra_body={"guided_regex": "[ab]{20}"})
    for regex in ("(metrics", "(m" * 100):  # a gateway refuses those that it knows already without a check
        with pytest.raises(openai.BadRequestError):
            chat(client, extra_body={"guided_regex": regex})
    least = {
        "blockyard:constraint_masks_total": 20,
        "blockyard:constraint_first_mask_seconds_count": 2,
        "blockyard:constraint_first_mask_seconds_sum": 1e-6,
        "blockyard:grammars_refused_total invalid": 2,
    }
    deadline = time.monotonic() + 10
    while True:
        after = metrics(ring)
        moved = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in least}
        if all(moved[name] >= value for name, value in least.items()):
            break
        assert time.monotonic() < deadline, moved
        time.sleep(0.1)
    assert moved["blockyard:constraint_first_mask_seconds_count"] == 2
    assert "blockyard:constraint_mask_waits_total" in after and "blockyard:matcher_restarts_total" in after
