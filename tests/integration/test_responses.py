"""/v1/responses of the demo model, with the official client and agents package.

The demo model was not trained to call tools: the grammar of forced calls gives its answers their form.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pytest
from agents.models.openai_responses import OpenAIResponsesModel
from openai.types.responses import Response
from pydantic import BaseModel
from rig import serve

PARSER = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serve("demo", "--dtype", "float32", *PARSER) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


class Search(BaseModel):
    """Finds a text."""

    case: bool


TOOLS: list[Any] = [
    {"type": "function", "name": "Search", "parameters": Search.model_json_schema(), "strict": False},
    {
        "type": "custom",
        "name": "run",
        "format": {"type": "grammar", "syntax": "regex", "definition": "(ls|cat) [a-z]{1,8}"},
    },
]


def said(response: Any) -> list[Any]:
    """What the items say, without their ids."""
    kept = [item.to_dict() for item in response.output]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in kept]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100},
        {"tools": TOOLS, "tool_choice": {"type": "custom", "name": "run"}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": Search.model_json_schema()}}},
    ],
    ids=["text", "calls", "a custom call", "a schema"],
)
def test_streamed_and_whole_say_the_same(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    for seed in range(2):
        asked: dict[str, Any] = {"model": "demo", "input": "Find it.", "max_output_tokens": 60} | fields
        asked["extra_body"] = {"seed": seed}
        whole = client.responses.create(**asked)
        *_, last = client.responses.create(stream=True, **asked)
        Response.model_validate(whole.to_dict())
        assert said(last.response) == said(whole) and last.response.usage.output_tokens == whole.usage.output_tokens
        for item in whole.output:
            if item.type == "custom_tool_call":
                assert item.name == "run" and item.input.split(" ")[0] in ("ls", "cat")
            elif item.type == "function_call" and item.status == "completed":
                Search.model_validate_json(item.arguments)


def test_the_prompt_of_the_turn_before_is_cached(client: openai.OpenAI) -> None:
    """The client sends the whole history each turn, as it got it."""
    items: list[Any] = [{"role": "developer", "content": "Be brief. " * 20}, {"role": "user", "content": "Find it."}]
    before, cached = 0, []
    for turn in range(4):
        answer = client.responses.create(
            model="demo", instructions="You search.", input=items, tools=TOOLS, parallel_tool_calls=False,
            tool_choice="required", max_output_tokens=200, store=False, extra_body={"seed": turn},
        )  # fmt: skip
        assert answer.usage is not None
        cached.append(answer.usage.input_tokens_details.cached_tokens)
        assert cached[-1] >= before // 16 * 16 - 16
        before = answer.usage.input_tokens
        [call] = [item.to_dict() for item in answer.output]
        output = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
        items += [call, {"type": output, "call_id": call["call_id"], "output": f"found {turn}"}]
    assert cached[0] == 0 and cached == sorted(cached) and len(set(cached)) == 4


def test_agents_call_a_tool_and_give_a_typed_result(client: openai.OpenAI) -> None:
    called: list[bool] = []

    @agents.function_tool
    def search(case: bool) -> str:
        """Finds a text."""
        called.append(case)
        return "line 7"

    async def run() -> tuple[Any, Any]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as asynchronous:
            model = OpenAIResponsesModel("demo", asynchronous)
            forced = agents.ModelSettings(tool_choice="required", max_tokens=200, parallel_tool_calls=False)
            searches = agents.Agent(
                name="a", model=model, tools=[search], model_settings=forced, tool_use_behavior="stop_on_first_tool"
            )
            untraced = agents.RunConfig(tracing_disabled=True)
            found = await agents.Runner.run(searches, "Find it.", run_config=untraced)
            types = agents.Agent(name="b", model=model, output_type=Search)
            streamed = agents.Runner.run_streamed(types, found.to_input_list(), run_config=untraced)
            async for _ in streamed.stream_events():
                pass
            return found.final_output, streamed.final_output

    text, typed = asyncio.run(run())
    assert text == "line 7" and len(called) == 1 and isinstance(typed, Search)
