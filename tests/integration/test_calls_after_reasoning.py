"""Forced calls behind reasoning, whose end the demo model often writes: it was not trained to reason."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from rig import serve

PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["lines", "bytes"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "measure", "parameters": PARAMETERS}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": ["never"]}}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serve(
            "demo", "--dtype", "float32", "--tool-call-parser", "hermes", "--reasoning-parser", "think:...return"
        ) as s,
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def asked(seed: int, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Write code."}], "tools": TOOLS, "seed": seed}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300, "temperature": 1.0}
    return {"model": "demo", **fields, **forced, **more}


@pytest.mark.parametrize("seed", range(4))
def test_a_call_comes_behind_reasoning(client: openai.OpenAI, seed: int) -> None:
    """The end is several tokens in some contexts, and where it does not come, the call has room all the same."""
    choice = client.chat.completions.create(**asked(seed)).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert json.loads(choice.message.tool_calls[0].function.arguments)["unit"] in ("lines", "bytes")
    assert not choice.message.content
    parts = [
        part.choices[0].delta for part in client.chat.completions.create(stream=True, **asked(seed)) if part.choices
    ]
    streamed = "".join(call.function.arguments or "" for part in parts for call in part.tool_calls or [])
    assert streamed == choice.message.tool_calls[0].function.arguments


def test_without_thinking_a_call_comes_at_once(client: openai.OpenAI) -> None:
    """The demo model's template ignores the switch. A format of the text has no effect beside a forced call."""
    more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "response_format": FORMAT}
    answer = client.chat.completions.create(**asked(0, **more))
    message = answer.choices[0].message
    assert message.tool_calls and not message.content and not getattr(message, "reasoning", None)
