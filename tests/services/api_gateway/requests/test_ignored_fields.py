"""Unknown request fields are ignored and reported; known fields that are not built are refused by name."""

import logging
import time
from typing import Any
from urllib.parse import unquote

import openai
import pytest

from blockyard.services.api_gateway.requests.ignored_fields import HEADER, MAX_HEADER_CHARS, MAX_LOGGED, IgnoredFields
from blockyard.shared.messages import Generate, Tokenize
from blockyard.shared.ring_client.request_fields.known_fields import MAX_NAME_CHARS, MAX_NAMES

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
CACHED = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}


async def named(r, path: str, body: dict[str, Any]) -> list[str] | None:
    """The names in the header of an answer, which must be a 200; None without the header."""
    async with r.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
        header = response.headers.get(HEADER)
        return None if header is None else header.split(", ")


async def test_unknown_fields_are_ignored_and_named_at_any_depth(rig) -> None:
    async with rig() as r:
        for stream in (False, True):
            body = {
                "messages": [{"role": "user", "content": [CACHED, CACHED], "id": 7}],
                "stream": stream,
                "stream_options": {"include_usage": True, "colour": 1} if stream else None,
                "enable_thinking": False,
                "session_id": {"a": [{"model": 1}]},
            }
            names = ["enable_thinking", "session_id", "messages.id", "messages.content.cache_control"]
            assert set(await named(r, CHAT, body) or []) == {*names, *(["stream_options.colour"] if stream else [])}
        parts = b'[{"type":"text","text":"hi"},{"type":"text","text":"hi"}]'
        assert {f.messages for f in r.ring.frames(Tokenize)} == {b'[{"role":"user","content":' + parts + b"}]"}
        assert await named(r, COMPLETION, {"prompt": "x", "messages": USER}) == ["messages"]
        assert await named(r, COMPLETION, {"prompt": "x"}) is None  # on the same connection
        assert await named(r, "/tokenize", {"messages": [USER[0] | {"id": 1}]}) == ["messages.id"]
        assert await named(r, "/detokenize", {"tokens": [1], "id": 1}) == ["id"]


async def test_the_official_client_reads_the_header(rig) -> None:
    async with rig() as r, openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="none", max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": [CACHED]}],
            prediction={"type": "content", "content": "x"},
            extra_body={"enable_thinking": True},
        )
        assert raw.headers[HEADER] == "enable_thinking, messages.content.cache_control"
        assert raw.parse().choices[0].message.content


async def test_other_errors_are_still_a_400_and_name_their_field(rig) -> None:
    async with rig() as r:
        for body, field in (
            ({"prompt": "x", "colour": 1, "max_tokens": "7"}, "max_tokens"),
            ({"prompt": "x", "colour": 1, "top_p": 2}, "top_p"),
            ({"prompt": "x", "colour": 1, "max_tokens": 4.5}, "max_tokens"),
            ({"colour": 1, "seed": True}, "seed"),
        ):
            status, answer = await r.post(COMPLETION, body)
            assert (status, answer["error"]["param"]) == (400, field), body
        status, answer = await r.post(CHAT, {"messages": [{"role": "user", "id": 1, "content": 5}]})
        assert (status, answer["error"]["param"]) == (400, "messages[0].content")
        status, answer = await r.post(COMPLETION, b'{"colour": 1, "prompt": "x", "min_p": 1e999}')
        assert status == 400
        status, answer = await r.post(COMPLETION, b'{"prompt": "x", "colour": ' + b"[" * 100_000)
        assert status == 400


HOSTILE = ["a\r\nset-cookie: x", "x, y", 'q"', "ключ", "\x00", "%0d", "`a` - at `$.n`"]


async def test_names_are_safe_in_the_header(rig) -> None:
    async with rig() as r:
        names = await named(r, COMPLETION, {"prompt": "x"} | dict.fromkeys(HOSTILE, 1))
        assert names is not None and [unquote(name) for name in names] == HOSTILE
        assert await named(r, COMPLETION, {"prompt": "x", "": 1}) == ['""']
        assert all(name.isascii() and name.isprintable() and not set(name) & set(' ,"\\') for name in names)


async def test_the_header_is_bounded(rig) -> None:
    async with rig() as r:
        for letter, count in (("x", 3000), ("ж" * 5000, 3), ("\U0001f600" * 70, 9)):
            fields = {f"{i}{letter}": i for i in range(count)}
            async with r.http.post(COMPLETION, json={"prompt": "x"} | fields) as response:
                assert response.status == 200
                header = response.headers[HEADER]
            names = header.split(", ")
            assert len(header) <= MAX_HEADER_CHARS and len(names) <= MAX_NAMES
            for name in names[:-1]:
                assert unquote(name) in {field[:MAX_NAME_CHARS] for field in fields}


def test_each_name_is_logged_once_and_so_many_at_most(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fields.note(["one", "two\nlines"])
        assert [m.rpartition(" ")[2] for m in caplog.messages] == ["one", "two%0Alines"]
        for i in range(3 * MAX_LOGGED):
            fields.note([f"field{i}"])
    assert len(caplog.messages) == MAX_LOGGED + 1 and "not logged" in caplog.messages[-1]


def test_long_and_many_names_cost_little(caplog: pytest.LogCaptureFixture) -> None:
    """They come from the body of a client, which may be large."""
    fields = IgnoredFields()
    with caplog.at_level(logging.WARNING):
        began = time.process_time()
        value = fields.note(["x" * 20_000_000, *(f"tools.{i}" for i in range(100_000))])
        assert time.process_time() - began < 1.0
    assert len(value) <= MAX_HEADER_CHARS and value.endswith(", ...")
    assert max(map(len, caplog.messages)) < 100 + MAX_NAME_CHARS
    assert fields.note(["a", "a", "b"]) == "a, b"


ASKS_FOR_NOTHING = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "parallel_tool_calls": False,
    "response_format": {"type": "text", "json_schema": None},
    "reasoning_effort": "none",
    "verbosity": "medium",
    "modalities": ["text"],
    "logits_processors": [],
    "truncation_side": "left",
    "mm_processor_kwargs": {},
    "audio": None,
    "kv_transfer_params": {},
    "vllm_xargs": {},
    "repetition_detection": {"max_pattern_size": 0, "min_count": 0},
    "return_prompt_text": False,
    "return_token_offsets": False,
    "return_assistant_tokens_mask": False,
}
REFUSED = {
    "tool_choice": "required",
    "thinking_token_budget": 5,
    "audio": {"voice": "alloy"},
    "moderation": {"model": "omni-moderation-latest"},
    "mm_processor_kwargs": {"num_crops": 4},
}


async def test_known_fields_that_are_not_built(rig) -> None:
    async with rig() as r:
        assert await named(r, CHAT, {"messages": USER, "max_tokens": 1} | ASKS_FOR_NOTHING) is None
        for field, value in REFUSED.items():
            status, answer = await r.post(CHAT, {"messages": USER, "colour": 1, field: value})
            assert (status, answer["error"]["param"]) == (400, field)
        status, answer = await r.post(COMPLETION, {"prompt_embeds": "AAAA", "prompt": "x"})
        assert (status, answer["error"]["param"]) == (400, "prompt_embeds")


async def test_whole_numbers_written_as_fractions(rig) -> None:
    async with rig() as r:
        body = {"prompt": [[72.0, 105]], "max_tokens": 4.0, "n": 2.0, "stop_token_ids": [5.0], "temperature": 1}
        assert await named(r, COMPLETION, body) is None
        [frame] = r.ring.frames(Generate)
        assert (frame.sampling.max_tokens, frame.sampling.stop_token_ids, len(frame.choices)) == (4, [5], 2)
        assert frame.prompt_ids == b"\x48\0\0\0\x69\0\0\0"
        assert await r.post("/detokenize", b'{"tokens": [104.0]}') == (200, {"prompt": "h"})
