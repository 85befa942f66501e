"""The litellm package, unmodified, over the providers that its users choose for a server of this kind."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from agent_scripts import PARSERS, call
from fake_ring import END, FakeRing

from blockyard.shared.messages import Generate, GrammarKind, Tokenize

USER = [{"role": "user", "content": "How is Rome?"}]
PROVIDERS = ["openai", "hosted_vllm"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "degrees", "description": "Looks.", "parameters": SCHEMA}}
# of pydantic, about the package's own types
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item .* is using the `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.*:DeprecationWarning"),
]
THOUGHT = "<think>I look.</think>"


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """The package asks the internet for prices while it is imported, unless told not to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        yield litellm


def answers(ring: FakeRing, *texts: str) -> None:
    """Answers the requests with these texts, in order of their arrival."""
    given: dict[str, str] = {}

    def script(request_id: str, index: int) -> str:
        text = given.setdefault(request_id, texts[min(len(given), len(texts) - 1)])
        return text[index * 5 :][:5] or END

    ring.script = script


def to(r: Any, provider: str = "openai") -> dict[str, Any]:
    base = r.url if provider == "anthropic" else f"{r.url}/v1"
    return {"model": f"{provider}/tiny", "api_base": base, "api_key": "one", "num_retries": 0, "max_retries": 0}


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_completion(rig, litellm, provider: str) -> None:
    async with rig(api_keys=["one"]) as r:
        whole = await litellm.acompletion(**to(r, provider), messages=USER, max_tokens=3, seed=7, top_p=0.5)
        [frame] = r.ring.frames(Generate)
        await litellm.close_litellm_async_clients()
    [choice] = whole.choices
    assert (choice.message.content, choice.finish_reason) == ("w0 w1 w2 ", "length")
    assert whole.usage.completion_tokens == 3 and whole.usage.total_tokens == 3 + whole.usage.prompt_tokens
    assert (frame.sampling.seed, frame.sampling.top_p) == (7, 0.5)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_stream(rig, litellm, provider: str) -> None:
    async with rig(tools=PARSERS, api_keys=["one"]) as r:
        answers(r.ring, f"{THOUGHT}Fine, thanks.")
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [c async for c in await litellm.acompletion(**to(r, provider), messages=USER, **fields)]
        await litellm.close_litellm_async_clients()
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == "Fine, thanks."
    assert built.choices[0].message.reasoning_content == "I look."
    assert built.choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_tools_over_several_turns(rig, litellm, provider: str, stream: bool) -> None:
    turns = [THOUGHT + call("degrees", city="Rome") + call("degrees", city="Oslo"), call("degrees", city="Bonn")]
    messages: list[Any] = list(USER)
    async with rig(tools=PARSERS, api_keys=["one"], max_model_len=20_000) as r:
        answers(r.ring, *turns, "All are warm.")
        for _ in range(3):
            got = await litellm.acompletion(**to(r, provider), messages=messages, tools=[TOOL], stream=stream)
            whole = litellm.stream_chunk_builder([c async for c in got]) if stream else got
            said, reason = whole.choices[0].message, whole.choices[0].finish_reason
            messages.append(said.model_dump(exclude_none=True))
            for one in said.tool_calls or []:
                city = json.loads(one.function.arguments)["city"]
                messages.append({"role": "tool", "tool_call_id": one.id, "content": f"21 in {city}"})
        prompts = [json.loads(frame.messages) for frame in r.ring.frames(Tokenize)]
        await litellm.close_litellm_async_clients()
    assert (said.content, reason) == ("All are warm.", "stop")
    roles = ["user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [message["role"] for message in prompts[2]] == roles
    assert prompts[2][: len(prompts[1])] == prompts[1] and prompts[1][1]["reasoning_content"] == "I look."
    assert [message["content"] for message in prompts[2] if message["role"] == "tool"] == [
        f"21 in {city}" for city in ("Rome", "Oslo", "Bonn")
    ]


async def test_a_typed_answer(rig, litellm) -> None:
    async with rig() as r:
        answers(r.ring, '{"city": "Rome"}')
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
        whole = await litellm.acompletion(**to(r), messages=USER, response_format=wanted)
        [asked] = r.ring.frames(Tokenize)
        await litellm.close_litellm_async_clients()
    assert json.loads(whole.choices[0].message.content) == {"city": "Rome"}
    assert asked.grammar is not None and asked.grammar.kind is GrammarKind.JSON_SCHEMA


async def test_text_completion(rig, litellm) -> None:
    async with rig() as r:
        client = openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="one")  # the package would not close its own
        asked: dict[str, Any] = to(r) | {"model": "text-completion-openai/tiny", "client": client}
        whole = await litellm.atext_completion(**asked, prompt="Once", max_tokens=2)
        chunks = [c async for c in await litellm.atext_completion(**asked, prompt="Once", max_tokens=2, stream=True)]
        await client.close()
        await litellm.close_litellm_async_clients()
    assert whole.choices[0].text == "w0 w1 "
    assert "".join(c.choices[0].text or "" for c in chunks if c.choices) == "w0 w1 "


async def test_responses(rig, litellm) -> None:
    tool = {"type": "function", "name": "degrees", "parameters": SCHEMA}
    history: list[Any] = list(USER)
    async with rig(tools=PARSERS, api_keys=["one"], max_model_len=20_000) as r:
        answers(r.ring, THOUGHT + call("degrees", city="Rome"), "It has 21.", "It has 22.")
        whole = await litellm.aresponses(**to(r), input=history, tools=[tool])
        reasoning, called = whole.output
        assert (reasoning.type, called.type, called.arguments) == ("reasoning", "function_call", '{"city": "Rome"}')
        history += [item.model_dump(exclude_none=True) for item in whole.output]
        history.append({"type": "function_call_output", "call_id": called.call_id, "output": "21"})
        second = await litellm.aresponses(**to(r), input=history, tools=[tool])
        events = [e async for e in await litellm.aresponses(**to(r), input=history, tools=[tool], stream=True)]
        last = json.loads(r.ring.frames(Tokenize)[-1].messages)
        await litellm.close_litellm_async_clients()
    assert second.output[0].content[0].text == "It has 21." and second.usage.output_tokens > 0
    kinds = [str(getattr(event.type, "value", event.type)) for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    deltas = [event.delta for event, kind in zip(events, kinds, strict=True) if kind.endswith("text.delta")]
    assert "".join(deltas) == "It has 22."
    assert [m["role"] for m in last] == ["user", "assistant", "tool"] and last[1]["reasoning_content"] == "I look."


async def test_messages(rig, litellm) -> None:
    tool = {"name": "degrees", "description": "Looks.", "input_schema": SCHEMA}
    async with rig(tools=PARSERS, api_keys=["one"], max_model_len=20_000) as r:
        answers(r.ring, THOUGHT + call("degrees", city="Rome"), "It has 21.", "It has 22.")
        fields: dict[str, Any] = {"max_tokens": 100, "tools": [tool]}
        asked = to(r, "anthropic")
        first = await litellm.anthropic.messages.acreate(**asked, messages=USER, **fields)
        blocks = first["content"]
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "21"}
        turns = [*USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        second = await litellm.anthropic.messages.acreate(**asked, messages=turns, **fields)
        # and through litellm's own translation of chat
        chat = await litellm.acompletion(**asked, messages=USER, max_tokens=100, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in chat])
        await litellm.close_litellm_async_clients()
    assert [block["type"] for block in blocks] == ["thinking", "tool_use"] and first["stop_reason"] == "tool_use"
    assert second["content"] == [{"type": "text", "text": "It has 21."}] and second["stop_reason"] == "end_turn"
    assert text == "It has 22."


async def test_errors_become_its_exceptions(rig, litellm) -> None:
    async with rig(api_keys=["one"]) as r:
        for provider in (*PROVIDERS, "anthropic"):
            asked: dict[str, Any] = to(r, provider) | {"max_tokens": 10}
            with pytest.raises(litellm.AuthenticationError):
                await litellm.acompletion(**(asked | {"api_key": "wrong"}), messages=USER)
            with pytest.raises(litellm.NotFoundError, match="gpt-9"):
                await litellm.acompletion(**(asked | {"model": f"{provider}/gpt-9"}), messages=USER)
            with pytest.raises(litellm.BadRequestError, match="top_p"):
                await litellm.acompletion(**asked, messages=USER, top_p=7.0)
            with pytest.raises(litellm.ContextWindowExceededError):
                await litellm.acompletion(**asked, messages=[{"role": "user", "content": "a" * 999}])
        r.ring.fail_at = 2
        with pytest.raises(litellm.exceptions.MidStreamFallbackError, match="stumbled"):
            async for _ in await litellm.acompletion(**to(r), messages=USER, stream=True):
                await asyncio.sleep(0)
        await litellm.close_litellm_async_clients()
