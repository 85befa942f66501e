"""Every invalid request is a 4xx in OpenAI's format that names the field, and the gateway keeps serving."""

import gzip
import time
from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.requests.schemas import CompletionRequest, decode, field_before
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.request_fields.known_fields import MAX_NAME_CHARS

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
DEEP = b'{"chat_template_kwargs": ' + b"[" * 100_000


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 2} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 2} | fields


TOOLS = [{"type": "function", "function": {"name": "f"}}]
BOTH = {  # field -> values that either endpoint refuses
    "temperature": [-0.1, "0.5", [1], True, 1000],
    "top_p": [0, 0.0, -1, 1.01, "1"],
    "top_k": [-2, 1.5, "5"],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e9, 5e-324, 0.0099, 100.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1, "x"],
    "n": [0, -1, 129, 1.5, "2"],
    "best_of": [21, 0, -1, "2"],
    "length_penalty": [2.0, "x"],  # without use_beam_search
    "early_stopping": [True, "never", 5],
    "max_tokens": [-2, 1.5, "7"],
    "min_tokens": [-1, 3],
    "seed": [2**64, -(2**63) - 1, "a", 1.5],
    "stop": [["a"] * 17, [""], [1], 5, "x" * 1025],
    "stop_token_ids": [[300], [-1], ["a"], [1] * 1025],
    "logit_bias": [{"300": 1}, {"-1": 1}, {"a": 1}, {"5": 101}, {"5": "1"}, [1], {"9" * 30: 1}, {"²": 1}],
    "allowed_token_ids": [[], [300], [-5], ["a"]],
    "bad_words": [[""], ["x"] * 1025, "x"],
    "prompt_logprobs": [-1, 21, True, "1"],
    "truncate_prompt_tokens": [0, -2],
    "priority": [2**31, 1.5],
    "user": [5, "x" * 513],
    "cache_salt": ["", "x" * 257, 5],
    "stream": ["yes", 1],
    "ignore_eos": ["yes"],
    "response_format": ["json_object", {"type": "xml"}, {"type": "json_schema", "json_schema": {}}, {}],
    "guided_json": [5, ["a"]],
    "guided_regex": [5, ""],
    "guided_choice": [[], [""], "a", [1]],
    "guided_grammar": ["", {}],
    "structured_outputs": [{}, {"regex": "a+", "choice": ["a"]}, {"regexp": "a"}, {"whitespace_pattern": " "}, "a"],
    "use_beam_search": ["yes", 1],
    "logits_processors": [["x.y"], "x.y", [5]],
    "stream_options": [{"include_usage": True}],  # not streamed
}
CASES = [
    (path, make(**{field: value}), field)
    for field, values in BOTH.items()
    for value in values
    for path, make in ((CHAT, chat), (COMPLETION, text))
]
CASES += [
    (CHAT, chat(**{field: value}), field)
    for field, values in {
        "messages": [None, [], "hi", {}, 5],
        "logprobs": [1, "true"],
        "top_logprobs": [5],  # without logprobs
        "max_completion_tokens": [0, -1, 5],  # 5: beside max_tokens
        "tools": [{}, "f", 5],
        "tool_choice": ["required", {"type": "function"}],
        "parallel_tool_calls": ["yes"],
        "reasoning_effort": ["much", 5],
        "verbosity": ["long"],
        "include_reasoning": ["yes"],
        "functions": [[{}]],
        "modalities": [["audio"]],
        "audio": [{"voice": "x"}],
        "echo": [1, "yes"],
        "chat_template": [5],
        "chat_template_kwargs": [[], "x"],
        "documents": [{}],
    }.items()
    for value in values
]
CASES += [
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (CHAT, chat(stream=True, prompt_logprobs=1), "prompt_logprobs"),
    (CHAT, chat(stream=True, stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
    (CHAT, chat(messages=[{"content": "x"}]), "messages[0].role"),
    (CHAT, chat(messages=[*USER, {"role": "user"}]), "messages[1].content"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"text": "x"}]}]), "messages[0].content[0].type"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        "messages[0].content[0].type",
    ),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
    (CHAT, chat(messages=[*USER, {"role": "assistant", "tool_calls": [{}]}]), "messages[1].tool_calls[0].id"),
    (CHAT, chat(tools=TOOLS, functions=[{"name": "f"}]), "functions"),
    (CHAT, chat(tools=[*TOOLS, *TOOLS], tool_choice="none"), "tools[1].function.name"),
    (CHAT, chat(tools=TOOLS, tool_choice="auto"), "tool_choice"),
    (CHAT, chat(tools=TOOLS), "tool_choice"),
    (CHAT, chat(thinking_token_budget=5), "thinking_token_budget"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 300}]), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 300}], max_tokens=None), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": "rejected"}]), "chat_template"),
    (COMPLETION, text(max_tokens=0), "max_tokens"),
    (COMPLETION, text(max_tokens=-2, echo=True), "max_tokens"),
    (COMPLETION, text(max_tokens=10**6, min_tokens=252), "min_tokens"),
    (COMPLETION, text(prompt="x" * 257, max_tokens=0, echo=True), "prompt"),
    (COMPLETION, text(allowed_token_ids=[299], min_tokens=1), "allowed_token_ids"),
    (COMPLETION, text(allowed_token_ids=[7, 299], min_tokens=1, stop_token_ids=[7, 9]), "allowed_token_ids"),
    (CHAT, chat(allowed_token_ids=[104], bad_words=["h"]), "allowed_token_ids"),
    (COMPLETION, text(prompt="x" * 256), "prompt"),
    (COMPLETION, text(prompt=["x", "x" * 200_000]), "prompt[1]"),
    (COMPLETION, text(prompt=["x"] * 100, n=100), "n"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 200_000}]), "messages"),
    (COMPLETION, text(prompt=[1] * 256), "prompt"),
    (COMPLETION, text(prompt=None), "prompt"),
    (COMPLETION, {"model": "tiny"}, "prompt"),
    (COMPLETION, text(prompt=""), "prompt"),
    (COMPLETION, text(prompt=[]), "prompt"),
    (COMPLETION, text(prompt=[[]]), "prompt[0]"),
    (COMPLETION, text(prompt=["a", ""]), "prompt[1]"),
    (COMPLETION, text(prompt=[1, "a"]), "prompt[0]"),
    (COMPLETION, text(prompt=[1, -1, 2**40, "a"]), "prompt[0]"),
    (COMPLETION, text(prompt=[[1], 2]), "prompt[1]"),
    (COMPLETION, text(prompt=[1, 300]), "prompt"),
    (COMPLETION, text(prompt=[[1], [-1]]), "prompt[1]"),
    (COMPLETION, text(prompt=[[1.5]]), "prompt[0][0]"),
    (COMPLETION, text(prompt=["a"] * 2049), "prompt"),
    (COMPLETION, text(logprobs=-1), "logprobs"),
    (COMPLETION, text(logprobs=21), "logprobs"),
    (COMPLETION, text(logprobs=True), "logprobs"),
    (COMPLETION, text(suffix=3), "suffix"),
    (COMPLETION, text(prompt=[1, 2], suffix="end"), "suffix"),
    (COMPLETION, text(suffix="end", echo=True), "echo"),
    (CHAT, chat(suffix="end"), "suffix"),
    (COMPLETION, b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (COMPLETION, b'{"prompt": "x", "top_p": -Infinity}', "top_p"),
    (COMPLETION, b'{"prompt": "x", "min_p": 1e999}', "min_p"),
    (COMPLETION, b'{"prompt": "x\xff"}', None),
    (COMPLETION, b'{"prompt": "x", "user": "\xc3"}', None),
    (COMPLETION, b'{"prompt": "\\ud800"}', None),
    (COMPLETION, b'{"prompt": "x"', None),
    (COMPLETION, b'{"prompt": "x"} {}', None),
    (COMPLETION, b"", None),
    (COMPLETION, b"[]", None),
    (COMPLETION, b"null", None),
    (COMPLETION, b'"hi"', None),
    (CHAT, DEEP, None),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": [1]}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [97] * 257}, "tokens"),  # the context has 256
    ("/tokenize", {"prompt": "x" * 257}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 257}]}, "messages"),
    ("/detokenize", {"tokens": [300]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]

CASES += [  # numbers that no float and no integer holds, in fields that are kept as JSON text
    (path, b'{"model": "tiny", %b, "%b": %b}' % (prompt, field.encode(), value), field)
    for path, prompt, fields in (
        (CHAT, b'"messages": [{"role": "user", "content": "hi"}]', ("tools", "tool_choice", "functions", "audio")),
        (COMPLETION, b'"prompt": "x"', ("response_format", "structured_outputs", "guided_json", "logits_processors")),
        (COMPLETION, b'"prompt": "x"', ("prompt_embeds", "guided_decoding_backend")),
        ("/tokenize", b'"messages": [{"role": "user", "content": "hi"}]', ("tools",)),
    )
    for field in fields
    for value in (b"1e999", b"[-1e400]", b'{"type": "json_object", "a": [1, 1e400]}', b"9" * 5000)
]

STRICT = [  # unknown fields, which are a 400 with --strict-fields
    (CHAT, chat(no_such_field=1), "no_such_field"),
    (COMPLETION, text(no_such_field=None), "no_such_field"),
    (CHAT, chat(prompt="hi"), "prompt"),
    (COMPLETION, text(messages=USER), "messages"),
    (CHAT, chat(stream=True, stream_options={"colour": 1}), "stream_options.colour"),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "colour": 1}]), "messages[0].colour"),
    (CHAT, chat(max_tokens=2.0, messages=[{"role": "user", "content": "x", "colour": 1}]), "messages[0].colour"),
    ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
    ("/detokenize", {"tokens": [1], "colour": 1}, "colour"),
]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
async def test_invalid_fields_are_a_400_that_names_the_field(rig, strict: bool) -> None:
    wrong = []
    async with rig(strict_fields=strict) as r:
        for path, body, field in STRICT if strict else CASES:
            status, answer = await r.post(path, body)
            error = answer.get("error", {})
            named = str(error.get("param") or "")
            fits = field is None or named == field or named.startswith((field + ".", field + "["))
            if status != 400 or not fits or error["type"] != "invalid_request_error" or len(error["message"]) > 400:
                wrong.append((path, str(body)[:120], field, status, str(answer)[:300]))
        assert wrong == []
        assert r.gateway.journal.entries == {} and r.gateway.num_active == 0
        status, answer = await r.post(COMPLETION, text())
    assert status == 200 and answer["choices"][0]["text"] == "w0 w1 "


async def test_unknown_model_is_404(rig) -> None:
    async with rig() as r:
        for path, body in (
            (CHAT, chat(model="gpt-9")),
            (COMPLETION, text(model="gpt-9")),
            ("/tokenize", {"model": "gpt-9", "prompt": "x"}),
        ):
            status, answer = await r.post(path, body)
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "model", "model_not_found")


@pytest.mark.parametrize("wrap", [bytes, gzip.compress], ids=["plain", "compressed"])
async def test_a_body_over_the_limit_is_413(rig, wrap) -> None:
    async with rig(max_body_bytes=10_000) as r:
        body = wrap(b'{"prompt": "' + b"x" * 20_000 + b'"}')
        headers = {} if wrap is bytes else {"Content-Encoding": "gzip"}
        status, answer = await r.post(COMPLETION, body, headers=headers)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert (await r.post(COMPLETION, text()))[0] == 200


async def test_a_body_that_does_not_decompress_is_400(rig) -> None:
    async with rig() as r:
        status, answer = await r.post(COMPLETION, b"not gzip at all", headers={"Content-Encoding": "gzip"})
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"


async def test_paths_and_methods(rig) -> None:
    async with rig() as r:
        async with r.http.get("/v1/engines") as response:
            assert response.status == 404 and "/v1/engines" in (await response.json())["error"]["message"]
        async with r.http.get(CHAT) as response:
            assert response.status == 405 and (await response.json())["error"]["code"] == "method_not_allowed"
        async with r.http.get("/page/../service.py") as response:
            assert response.status == 404


async def test_fields_without_effect_are_accepted(rig) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "n": None,
        "stop": None,
        "seed": None,
        "logit_bias": None,
        "response_format": {"type": "text"},
        "best_of": 1,
    }
    async with rig() as r:
        status, answer = await r.post(CHAT, chat(tools=[], tool_choice="none", parallel_tool_calls=True, **harmless))
        assert status == 200, answer
        status, answer = await r.post(COMPLETION, text(suffix=None, **harmless))
        assert status == 200, answer


@pytest.mark.parametrize(
    "name",
    [
        " - at `$" * 11_000 + "\n",
        "unknown field `" * 6_000,
        "`" * 88_000,
        "\\" * 40_000,
        "missing required field `" * 4_000,
    ],
    ids=["path", "unknown", "backquotes", "backslashes", "missing"],
)
def test_a_long_field_name_costs_no_more_than_its_length(name: str) -> None:
    """Regression: this was quadratic, and 88 kB blocked the event loop for 7 to 12 s."""
    body = msgspec.json.encode({"prompt": "x", name: 1})
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        decode(body, CompletionRequest, strict=True)
    assert decode(body, CompletionRequest)[1] == [name[:MAX_NAME_CHARS]]
    assert time.process_time() - began < 0.5
    assert len(str(caught.value)) < 400 and len(caught.value.field) < 400
    for end in (b"nul", b'"a": nul'):  # malformed at its end
        with pytest.raises(RequestError):
            decode(body[:-1] + b"," + end, CompletionRequest)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("before", "field"),
    [
        (b'{"a": ', "a"),
        (b'{"b": 1, "a" : [1, ', "a"),
        (b'{"a": "x', ""),  # within a string
        (b'{"say \\"a\\"": ', 'say \\"a\\"'),
        (b'{"a\\\\": ', "a\\\\"),
        (b'"', ""),
        (b'": ', ""),
        (b"{", ""),
        (b"", ""),
    ],
)
def test_the_key_before_malformed_json(before: bytes, field: str) -> None:
    assert field_before(before + b"NaN", len(before)) == field


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "m" * 50_000},
        {"tool_choice": "t" * 50_000},
        {"response_format": {"type": "r" * 50_000}},
        {"f" * 50_000: 1, "temperature": "x" * 50_000},
        {"stop": ["s" * 50_000] * 3, "reasoning_effort": "e" * 50_000},
    ],
)
async def test_no_error_repeats_a_long_value(rig, wrong: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]} | wrong
    async with rig(strict_fields=True) as r:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
            status, error = await r.post(path, body)
            assert 400 <= status < 500 and len(msgspec.json.encode(error)) < 3000, path
