"""What chat templates get besides the messages: tools and variables, of the request or of the deployment."""

from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.requests.schemas import ChatRequest
from blockyard.services.api_gateway.requests.validate import parse_chat
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.messages import (
    Generate,
    Grammar,
    GrammarKind,
    ModelCard,
    ModelSettings,
    OutputConstraint,
    Tokenize,
    ToolDefaults,
)
from blockyard.shared.ring_client.request_fields.engine_fields import read_thinking_budget
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats

PROCESS = ProcessConfig(name="api_gateway", bus=BusConfig(registry="ipc:///none", bind="ipc:///none"))
CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def sent(r: Any, path: str = CHAT, **fields: Any) -> Tokenize:
    body = {"messages": USER} | ({"max_tokens": 1} if path == CHAT else {}) | fields
    status, answer = await r.post(path, body)
    assert status == 200, answer
    [*_, frame] = r.ring.frames(Tokenize)
    assert isinstance(frame, Tokenize)
    return frame


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"a": 1, "b": 2}),
        ({"chat_template_kwargs": {"b": 3}}, {"a": 1, "b": 3}),
        ({"reasoning_effort": "low", "verbosity": "high"}, {"reasoning_effort": "low", "verbosity": "high"}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}}, {"reasoning_effort": "max"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
    ],
)
async def test_variables(rig, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    async with rig(template_kwargs=b'{"a": 1, "b": 2}') as r:
        frame = await sent(r, **fields)
    assert msgspec.json.decode(frame.template_kwargs) == {"a": 1, "b": 2} | expected


async def test_tools_are_shown_unless_they_are_excluded(rig) -> None:
    async with rig() as r:
        assert msgspec.json.decode((await sent(r, tools=TOOLS, tool_choice="none")).tools) == TOOLS
        assert msgspec.json.decode((await sent(r, "/tokenize", tools=TOOLS)).tools) == TOOLS
        assert (await sent(r)).tools == b""
    async with rig(tools=ToolDefaults(exclude_when_none=True)) as r:
        assert (await sent(r, tools=TOOLS, tool_choice="none")).tools == b""


async def test_the_end_of_reasoning_goes_with_grammars_and_budgets(rig) -> None:
    async with rig(tools=ToolDefaults(reasoning_end="</think>", reasoning_start="<think>")) as r:
        assert (await sent(r)).reasoning_end == (await sent(r)).reasoning_start == ""
        assert (await sent(r, thinking_token_budget=-1)).reasoning_end == ""
        assert (await sent(r, thinking_token_budget=5)).reasoning_end == "</think>"
        frame = await sent(r, response_format={"type": "json_object"})
        assert frame.reasoning_start == "<think>"
        assert (frame.reasoning_end, frame.grammar) == ("</think>", Grammar(GrammarKind.JSON_OBJECT, ""))
        status, answer = await r.post(CHAT, {"messages": USER, "thinking_token_budget": -2})
        assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
        assert len(r.ring.frames(Generate)) == 5


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0),
        ({"chat_template_kwargs": {"thinking": False}}, 0),
        ({"reasoning_effort": "none"}, 0),
        ({"chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 5}, 5),
        ({"chat_template_kwargs": {"enable_thinking": True}}, None),
        ({"tool_choice": "none", "reasoning_effort": "none"}, None),
    ],
)
def test_thinking_that_is_off_is_a_budget_beside_a_grammar(fields: dict[str, Any], budget: int | None) -> None:
    """The template may ignore the switch."""
    tools = ToolDefaults(parser="hermes", reasoning_end="</think>", reasoning_start="<think>")
    card = ModelCard(["m"], "m", 100, 300, 0, [2], ModelSettings(tools=tools))
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required"} | fields
    request = msgspec.json.decode(msgspec.json.encode(body), type=ChatRequest)
    parsed = parse_chat(request, card, GatewayConfig(process=PROCESS), OutputFormats.load(tools), "x")
    assert parsed.thinking_budget == budget


def test_a_budget_of_any_size_fits_into_a_frame() -> None:
    budget = read_thinking_budget(2**70, ToolDefaults(reasoning_end="</think>"))
    assert budget is not None and budget >= 2**32 and msgspec.msgpack.encode(OutputConstraint(budget=budget))


async def test_grammars_of_harmony_begin_with_the_answer(rig) -> None:
    """They allow reasoning themselves; the marker that ends it does not come before a call."""
    end = "<|channel|>final<|message|>"
    harmony = ToolDefaults(parser="openai", reasoning_parser="openai_gptoss", reasoning_end=end)
    async with rig(tools=harmony) as r:
        frame = await sent(r, tools=TOOLS, tool_choice="required")
        assert frame.reasoning_end == "" and frame.grammar is not None and " to=functions.f" in frame.grammar.source
        assert frame.inner_end == "<|end|>"
        assert (await sent(r, response_format={"type": "json_object"})).inner_end == ""
        assert (await sent(r, response_format={"type": "json_object"})).reasoning_end == end
        body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "thinking_token_budget": 5}
        status, answer = await r.post(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
