"""Agent loops of the official `openai` client, unmodified, with its helpers for streams and for parsing.

The demo model was not trained to call tools: the grammar of forced calls gives its answers their form.
"""

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field
from rig import serve

QUESTION = "Which of the files has the longest line?"
NUM_CALLS = 3
PARSER = ("--tool-call-parser", "auto", "--enable-auto-tool-choice")


class Unit(StrEnum):
    LINES = "lines"
    BYTES = "bytes"


class ReadFile(BaseModel):
    """Reads a part of a file."""

    path: str = Field(max_length=24)
    first: int = Field(ge=0, le=999)
    unit: Unit


class Search(BaseModel):
    """Finds texts in files."""

    texts: list[Annotated[str, Field(max_length=12)]] = Field(max_length=3)
    case: bool


class Mark(BaseModel):
    """Marks a line. Its calls are short: the model makes as many as the grammar lets it, 32."""

    line: int = Field(ge=0, le=9)


MODELS = {"ReadFile": ReadFile, "Search": Search}
TOOLS: list[Any] = [openai.pydantic_function_tool(model) for model in MODELS.values()]
SHORT_TOOLS: list[Any] = [openai.pydantic_function_tool(Mark)]


@pytest.fixture(scope="module", params=[(), PARSER], ids=["no parser", "parser"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with (
        serve("demo", "--dtype", "float32", *request.param) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def asked(messages: list[Any], **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": "demo", "messages": messages, "tools": TOOLS, "max_tokens": 600}
    return fields | {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0} | more


def result_of(call: Any) -> dict[str, Any]:
    """What the agent answers to a call, whose arguments the client has parsed."""
    arguments = call.function.parsed_arguments
    assert isinstance(arguments, MODELS[call.function.name])
    assert json.loads(call.function.arguments) == arguments.model_dump(mode="json")
    return {"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: {arguments!r}"[:80]}


def remembered(message: Any) -> dict[str, Any]:
    """The answer as the history of the next request has it."""
    return {
        "role": "assistant",
        "content": message.content,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ],
    }


def test_an_agent_loop_with_parsed_answers(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    ids = set()
    for turn in range(NUM_CALLS):
        answer = client.chat.completions.parse(**asked(messages, seed=turn))
        [choice] = answer.choices
        [call] = choice.message.tool_calls or []
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        ids.add(call.id)
        messages += [remembered(choice.message), result_of(call)]
    assert len(ids) == NUM_CALLS
    last = client.chat.completions.create(**asked(messages, tool_choice="none", max_tokens=20))
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


def test_an_agent_loop_with_streamed_answers(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(NUM_CALLS):
        pieces: list[str] = []
        done: list[Any] = []
        with client.chat.completions.stream(**asked(messages, seed=turn)) as stream:
            for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    pieces.append(event.arguments_delta)
                elif event.type == "tool_calls.function.arguments.done":
                    done.append(event)
            answer = stream.get_final_completion()
        [call] = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert "".join(pieces) == call.function.arguments == done[0].arguments and len(pieces) > 1
        assert done[0].name == call.function.name and done[0].parsed_arguments == call.function.parsed_arguments
        messages += [remembered(answer.choices[0].message), result_of(call)]
        if turn == 0:
            whole = client.chat.completions.parse(**asked(messages[:-2], seed=turn)).choices[0].message
            assert [one.function.arguments for one in whole.tool_calls or []] == [call.function.arguments]


def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "Search"}}
    answer = client.chat.completions.parse(**asked([{"role": "user", "content": QUESTION}], tool_choice=choice))
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Search)


def test_several_calls_have_ids_and_places_of_their_own(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": QUESTION}]
    fields = asked(question, tools=SHORT_TOOLS, parallel_tool_calls=True, max_tokens=3000, seed=3)
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        calls = stream.get_final_completion().choices[0].message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) > 1
    assert all(isinstance(call.function.parsed_arguments, Mark) for call in calls)


def test_auto_needs_a_parser(client: openai.OpenAI, request: pytest.FixtureRequest) -> None:
    fields = asked([{"role": "user", "content": QUESTION}], tool_choice="auto", max_tokens=20)
    if "no parser" not in request.node.name:
        assert client.chat.completions.create(**fields).choices[0].message.content
        return
    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice") as refused:
        client.chat.completions.create(**fields)
    assert "--tool-call-parser" in str(refused.value) and refused.value.param == "tool_choice"
