"""Agent loops of published libraries, unmodified, against a running server: each makes at least five calls of tools.

The libraries are no requirements of the tests. They have a virtual environment of their own, and this project's runs
the server:

    blockyard serve demo --tool-call-parser auto --enable-auto-tool-choice &
    python3 -m venv agents && agents/bin/pip install openai-agents "pydantic-ai-slim[openai]"
    agents/bin/python tests/bench/structured_output/agent_libraries.py http://127.0.0.1:8000/v1

The demo model was not trained to call tools, so that `tool_choice: required` forces the calls; the libraries check the
arguments by the types of the functions and send the results back. Prints a line for each loop; the exit status is 1 if
one raised an exception or made fewer calls.
"""

import asyncio
import sys
import traceback
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

NUM_CALLS = 5
QUESTION = "Which of the files has the longest line?"
SETTINGS: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1000, "parallel_tool_calls": False}
Path = Annotated[str, Field(max_length=12)]
Number = Annotated[int, Field(ge=0, le=999)]


async def openai_agents(url: str, streamed: bool) -> int:
    """Ends by the library's hook behind the fifth result. Returns the number of results that the history has."""
    import agents
    from agents.agent import ToolsToFinalOutputResult
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def read_file(path: Path, first: Number, unit: Literal["lines", "bytes"]) -> str:
        """Reads a part of a file."""
        called.append(path)
        return f"{first} {unit} of {path}"

    def enough(_context: object, results: list[Any]) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=len(called) >= NUM_CALLS, final_output=results[-1].output)

    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        agent = agents.Agent(
            name="reader",
            instructions="Use the tool.",
            model=agents.OpenAIChatCompletionsModel("demo", client),
            model_settings=agents.ModelSettings(tool_choice="required", **SETTINGS),
            tools=[read_file],
            tool_use_behavior=enough,
            reset_tool_choice=False,
        )
        if streamed:
            run = agents.Runner.run_streamed(agent, QUESTION)
            kinds = {event.type async for event in run.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
        else:
            run = await agents.Runner.run(agent, QUESTION)
        outputs = [item for item in run.to_input_list() if item.get("type") == "function_call_output"]
        assert len(outputs) == len(called)
        assert run.final_output == outputs[-1]["output"]
        return len(called)


class Answer(BaseModel):
    """The name of the file."""

    path: Path
    length: Number


async def pydantic_ai(url: str, streamed: bool) -> int:
    """The output is a call of a tool too, and is refused until five calls were made. Returns the number of calls."""
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    num_calls = 0
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, output_type=Answer, retries=30, model_settings=SETTINGS)

    async def while_not_enough(_context: object, tool: Any) -> Any:
        """Without this tool the model has to give its output: it picks a tool by chance, and the history grows."""
        return tool if num_calls < NUM_CALLS else None

    @agent.tool_plain(prepare=while_not_enough)
    def read_file(path: Path, first: Number, unit: Literal["lines", "bytes"]) -> str:
        """Reads a part of a file."""
        nonlocal num_calls
        num_calls += 1
        return f"{first} {unit} of {path}"

    @agent.output_validator
    def enough(answer: Answer) -> Answer:
        nonlocal num_calls
        num_calls += 1
        if num_calls < NUM_CALLS:
            raise ModelRetry("Read more of the files first.")
        return answer

    async def read_events(_context: object, events: AsyncIterable[Any]) -> None:
        kinds.update([type(event).__name__ async for event in events])

    kinds: set[str] = set()  # a handler makes the library stream each answer
    result = await agent.run(QUESTION, event_stream_handler=read_events if streamed else None)
    assert isinstance(result.output, Answer)
    assert ("PartDeltaEvent" in kinds) == streamed, kinds
    return num_calls


async def attempt(name: str, loop: Callable[[str, bool], Awaitable[int]], url: str, streamed: bool) -> bool:
    try:
        num_calls = await loop(url, streamed)
    except Exception:  # noqa: BLE001  # whatever a library raises is the result
        traceback.print_exc()
        num_calls = 0
    print(f"{name}, {'streamed' if streamed else 'whole'}: {num_calls} calls")
    return num_calls >= NUM_CALLS


async def main(url: str) -> int:
    loops = {"openai-agents": openai_agents, "pydantic-ai": pydantic_ai}
    done = [await attempt(name, loop, url, streamed) for name, loop in loops.items() for streamed in (False, True)]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
