"""The official agents package, unmodified: its loop, with tools and typed results, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pytest
from agents.models.openai_responses import OpenAIResponsesModel
from pydantic import BaseModel

from blockyard.shared.messages import Generate, Tokenize, ToolDefaults

PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
END = "<end>"


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(ring: Any, *texts: str) -> None:
    """Answers the requests with these texts, in order of their arrival."""
    given: dict[str, str] = {}

    def script(request_id: str, index: int) -> str:
        text = given.setdefault(request_id, texts[min(len(given), len(texts) - 1)])
        return text[index] if index < len(text) else END

    ring.script = script


def settings(**fields: Any) -> agents.ModelSettings:
    return agents.ModelSettings(extra_body={"stop": END}, **fields)


class Weather(BaseModel):
    city: str
    degrees: int


class Rig:
    """A client, an agent with two tools, and what the tools were called with."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.called: list[tuple[str, str]] = []
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        @agents.function_tool
        def degrees(city: str) -> int:
            """The temperature in a city."""
            self.called.append(("degrees", city))
            return 21

        @agents.function_tool
        def wind(city: str) -> str:
            """The wind in a city."""
            self.called.append(("wind", city))
            return "none"

        model = OpenAIResponsesModel("tiny", self.client)
        self.agent = agents.Agent(
            name="a", instructions="Be brief.", model=model, tools=[degrees, wind], model_settings=settings(), **fields
        )


async def test_a_loop_with_tools(rig) -> None:
    async with rig(tools=PARSERS, max_model_len=20_000) as r:
        # several calls in one answer, then one, then text
        both = "<think>Both.</think>" + call("degrees", city="Rome") + "\n" + call("wind", city="Rome")
        answers(r.ring, both, call("wind", city="Oslo"), "<think>Now.</think>Fine.")
        made = Rig(r.url)
        async with made.client:
            result = await agents.Runner.run(made.agent, "How is Rome?")
        prompts = [json.loads(frame.messages) for frame in r.ring.frames(Tokenize)]
    assert result.final_output == "Fine."
    assert sorted(made.called) == [("degrees", "Rome"), ("wind", "Oslo"), ("wind", "Rome")]
    assert [message["role"] for message in prompts[0]] == ["system", "user"]
    assert [message["role"] for message in prompts[2]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]
    assert prompts[2][: len(prompts[1])] == prompts[1] and prompts[1][2]["reasoning_content"] == "Both."
    assert result.context_wrapper.usage.requests == 3 and result.context_wrapper.usage.output_tokens > 0


async def test_a_streamed_loop(rig) -> None:
    async with rig(tools=PARSERS, max_model_len=20_000) as r:
        answers(r.ring, call("degrees", city="Rome"), "It has 21.")
        made = Rig(r.url)
        async with made.client:
            result = agents.Runner.run_streamed(made.agent, "How is Rome?")
            text, kinds = "", []
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    text += event.data.delta
                elif event.type == "run_item_stream_event":
                    kinds.append(event.name)
    assert result.final_output == text == "It has 21." and made.called == [("degrees", "Rome")]
    assert kinds == ["tool_called", "tool_output", "message_output_created"]


async def test_a_typed_result(rig) -> None:
    async with rig(tools=PARSERS, max_model_len=20_000) as r:
        answers(r.ring, call("degrees", city="Rome"), '{"city": "Rome", "degrees": 21}')
        made = Rig(r.url, output_type=Weather)
        async with made.client:
            result = await agents.Runner.run(made.agent, "How is Rome?")
        grammars = [frame.grammar for frame in r.ring.frames(Tokenize)]
    assert result.final_output == Weather(city="Rome", degrees=21)
    assert all(grammar is not None and "degrees" in grammar.source for grammar in grammars)


async def test_a_tool_that_is_required_and_then_not(rig) -> None:
    async with rig(tools=PARSERS, max_model_len=20_000) as r:
        answers(r.ring, call("degrees", city="Rome"), "Warm.")
        made = Rig(r.url)
        made.agent.model_settings = settings(tool_choice="required", parallel_tool_calls=False, temperature=0.0)
        async with made.client:
            result = await agents.Runner.run(made.agent, "How is Rome?")
        first, second = r.ring.frames(Generate)
    assert result.final_output == "Warm." and first.sampling.temperature == 0.0
    assert len(made.called) == 1 and second.request_id != first.request_id


async def test_handing_over_to_another_agent(rig) -> None:
    async with rig(tools=PARSERS, max_model_len=20_000) as r:
        answers(r.ring, call("transfer_to_b"), "Here is b.")
        made = Rig(r.url)
        async with made.client:
            other = agents.Agent(name="b", model=made.agent.model, model_settings=settings())
            made.agent.handoffs = [other]
            result = await agents.Runner.run(made.agent, "b, please")
    assert result.final_output == "Here is b." and result.last_agent is other


@pytest.mark.parametrize("streamed", [False, True])
async def test_turns_by_the_id_of_the_response_before(rig, streamed: bool) -> None:
    """Each request brings only what is new; the server has the rest."""
    async with rig(tools=PARSERS, max_model_len=20_000) as r:
        answers(r.ring, "<think>So.</think>" + call("degrees", city="Rome"), "It has 21.", "No wind.")
        made = Rig(r.url)

        async def run(text: str, **fields: Any) -> Any:
            if not streamed:
                return await agents.Runner.run(made.agent, text, **fields)
            result = agents.Runner.run_streamed(made.agent, text, **fields)
            async for _ in result.stream_events():
                pass
            return result

        async with made.client:
            first = await run("How is Rome?", auto_previous_response_id=True)
            second = await run("And the wind?", previous_response_id=first.last_response_id)
        prompts = [json.loads(frame.messages) for frame in r.ring.frames(Tokenize)]
    assert (first.final_output, second.final_output) == ("It has 21.", "No wind.")
    roles = [[message["role"] for message in prompt] for prompt in prompts]
    assert roles[1] == ["system", "user", "assistant", "tool"]
    assert roles[2] == [*roles[1], "assistant", "user"]
    assert prompts[1][:2] == prompts[0] and prompts[2][:4] == prompts[1]
    assert prompts[2][2]["reasoning_content"] == "So."
