"""Answers with reasoning and tool calls over HTTP: streamed ones add up to whole ones, whatever the tokens are."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from fake_ring import CARD, SCHEDULER, member
from recorded_answers import pieces_of

from blockyard.services.api_gateway.bodies.body_parser import LARGE_BYTES
from blockyard.shared.config.services.gateway import ParserPlugins
from blockyard.shared.messages import Generate, Role, Tokenize, ToolDefaults

CHAT = "/v1/chat/completions"
HERMES = ToolDefaults(auto_choice=True, parser="hermes")
BOTH = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
FUNCTIONS = [{"name": "get_weather"}, {"name": "get_time"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
TOOLS.append({"type": "custom", "custom": {"name": "run"}})
END = "<|end|>"
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
RUN = '<tool_call>\n{"name": "run", "arguments": {"input": "echo \\"é\\"\\n"}}\n</tool_call>'
CALLED_WEATHER = ("function", "get_weather", '{"city": "Zürich"}')
CALLED_TIME = ("function", "get_time", "{}")
# text, content, reasoning, calls
ANSWERS: dict[str, tuple[str, str | None, str | None, list[tuple[str, str, str]]]] = {
    "text": ("It is < 5 & {fine}.", "It is < 5 & {fine}.", None, []),
    "nothing": ("", None, None, []),
    "one call": (WEATHER, None, None, [CALLED_WEATHER]),
    "two calls": (f"{WEATHER}\n{TIME}", None, None, [CALLED_WEATHER, CALLED_TIME]),
    "text before a call": (f"Let me see.\n\n{WEATHER}", "Let me see.", None, [CALLED_WEATHER]),
    "text around": (f"Look: {TIME} done", "Look:done", None, [CALLED_TIME]),
    "a custom tool": (RUN, None, None, [("custom", "run", 'echo "é"\n')]),
    "reasoning": ("<think>\nHm, 2 < 3.\n</think>\n\nYes.", "Yes.", "Hm, 2 < 3.", []),
    "reasoning alone": ("<think>\nI wonder", None, "I wonder", []),
    "reasoning and a call": (f"<think>\nso\n</think>\n\n{TIME}", None, "so", [CALLED_TIME]),
    "all": (f"<think>a</think>b{WEATHER}\n{RUN}", "b", "a", [CALLED_WEATHER, ("custom", "run", 'echo "é"\n')]),
    "a call that ends reasoning": (f"<think>so{TIME}", None, "so", [CALLED_TIME]),
    "a malformed call": ("<tool_call>\nget_time()\n</tool_call>", "<tool_call>\nget_time()\n</tool_call>", None, []),
}
# answers that end before their last call does
CUT: dict[str, tuple[str, str | None, list[tuple[str, str, str]]]] = {
    "in the arguments": (WEATHER.partition("rich")[0], None, [("function", "get_weather", '{"city": "Zü')]),
    "in the name": ("Wait.\n" + WEATHER.partition("eather")[0], "Wait.", []),
    "behind the marker": ("<tool_call>", None, []),
    "in the second name": (f"{WEATHER}\n" + TIME.partition("time")[0], None, [CALLED_WEATHER]),
    "in the second marker": (f"{WEATHER}\n<tool", None, [CALLED_WEATHER]),
    "in a marker": ("A tag is <tool", "A tag is <tool", []),
    "in the end of a call": (WEATHER[:-3], None, [CALLED_WEATHER]),
    "in a custom tool": (RUN.partition("é")[0], None, [("custom", "run", 'echo "')]),
}


def body(**fields: Any) -> dict[str, Any]:
    user = {"role": "user", "content": "hi"}
    return {"messages": [user], "max_tokens": 200, "stop": [END], "tools": TOOLS, "tool_choice": "auto"} | fields


def script(text: str, draw: random.Random | None = None) -> Any:
    """Tokens of this text, which end with a stop string."""
    pieces = [*(pieces_of(text, draw) if draw else list(text)), END]
    return lambda request_id, index: pieces[index] if index < len(pieces) else END


def calls_of(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    shown = []
    for call in message["tool_calls"]:
        inner = call[call["type"]]
        shown.append((call["type"], inner["name"], inner["arguments" if call["type"] == "function" else "input"]))
    return shown


def added_up(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The choice that a client puts together from a stream."""
    message: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": [], "finish_reason": None}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else []:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for key in ("content", "reasoning"):
                if delta.get(key) is not None:
                    message[key] = (message[key] or "") + delta[key]
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call)
                else:
                    [(kind, more)] = [(key, call[key]) for key in ("function", "custom") if key in call]
                    [(key, text)] = more.items()
                    message["tool_calls"][call["index"]][kind][key] += text
            message["finish_reason"] = choice["finish_reason"]
    return message


async def both_ways(r: Any, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of a streamed and of a whole answer."""
    events = await r.events(CHAT, body(**fields))
    status, answer = await r.post(CHAT, body(**fields))
    assert status == 200, answer
    [choice] = answer["choices"]
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"]
    return added_up(events), choice["message"] | {"finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("name", ANSWERS)
async def test_streamed_and_whole_answers_have_the_same_parts(rig, name: str) -> None:
    text, content, reasoning, calls = ANSWERS[name]
    async with rig(tools=BOTH) as r:
        for seed in range(5):
            r.ring.script = script(text, random.Random(seed) if seed else None)
            for message in await both_ways(r):
                assert (message["content"], message["reasoning"], calls_of(message)) == (content, reasoning, calls)
                assert message["finish_reason"] == ("tool_calls" if calls else "stop")
                ids = [call["id"] for call in message["tool_calls"]]
                assert len(set(ids)) == len(ids) and all(i.startswith("call_") and len(i) == 29 for i in ids)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_an_answer_that_ends_in_a_call(rig, name: str, choice: str) -> None:
    """The beginning of a call is not shown. The answer says length where that ended it, and else if calls are whole."""
    text, content, calls = CUT[name]
    whole = bool(calls) and calls[-1] == CALLED_WEATHER
    async with rig(tools=HERMES) as r:
        for seed in range(3):
            r.ring.script = script(text, random.Random(seed) if seed else None)
            for message in await both_ways(r, tool_choice=choice):
                assert calls_of(message) == calls
                assert message["content"] == content or (choice == "required" and "<" not in message["content"])
                assert message["finish_reason"] == ("tool_calls" if whole else "stop")
        r.ring.script = script(text)
        for message in await both_ways(r, tool_choice=choice, max_tokens=len(text)):
            assert (calls_of(message), message["finish_reason"]) == (calls, "length")


async def test_text_is_plain_where_no_tool_may_be_called(rig) -> None:
    async with rig(tools=HERMES) as r:
        r.ring.script = script(WEATHER)
        for fields in ({"tool_choice": "none"}, {"tools": None, "tool_choice": None}):
            for message in await both_ways(r, **fields):
                assert (message["content"], message["tool_calls"], message["finish_reason"]) == (WEATHER, [], "stop")
        r.ring.script = script(f"<think>a</think>{WEATHER}")
    async with rig(tools=BOTH) as r:
        r.ring.script = script(f"<think>a</think>{WEATHER}")
        for message in await both_ways(r, tool_choice="none"):
            assert (message["content"], message["reasoning"], message["tool_calls"]) == (WEATHER, "a", [])


async def test_without_parallel_calls_the_first_one_is_shown(rig) -> None:
    async with rig(tools=HERMES) as r:
        r.ring.script = script(f"a{WEATHER}\n{TIME}b")
        for message in await both_ways(r, parallel_tool_calls=False):
            assert (message["content"], calls_of(message)) == ("ab", [CALLED_WEATHER])


async def test_the_older_function_call(rig) -> None:
    asked = {"tools": None, "tool_choice": None, "functions": FUNCTIONS}
    async with rig(tools=HERMES) as r:
        r.ring.script = script(f"{WEATHER}\n{TIME}")
        events = await r.events(CHAT, body(**asked))
        _, answer = await r.post(CHAT, body(**asked))
        r.ring.script = script(TIME)
        _, named = await r.post(CHAT, body(**asked, function_call={"name": "get_time"}))
    [choice] = answer["choices"]
    expected = {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (expected, "function_call")
    deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events[:-1]]
    assert "".join(delta.get("name", "") for delta in deltas) == "get_weather"
    assert "".join(delta.get("arguments", "") for delta in deltas) == '{"city": "Zürich"}'
    assert named["choices"][0]["message"]["function_call"] == {"name": "get_time", "arguments": "{}"}


async def test_forced_calls_need_no_parser(rig) -> None:
    listed = '[{"name": "get_time", "parameters": {}}, {"name": "run", "parameters": {"input": "ls\\n"}}]'
    async with rig() as r:
        r.ring.script = script(listed)
        for message in await both_ways(r, tool_choice="required"):
            assert calls_of(message) == [CALLED_TIME, ("custom", "run", "ls\n")]
            assert (message["content"], message["finish_reason"]) == (None, "tool_calls")
        r.ring.script = script('{"city": "Zürich"}')
        for message in await both_ways(r, tool_choice={"type": "function", "function": {"name": "get_weather"}}):
            assert calls_of(message) == [CALLED_WEATHER] and message["finish_reason"] == "tool_calls"
        r.ring.script = script("ls -l\n")
        for message in await both_ways(r, tool_choice={"type": "custom", "custom": {"name": "run"}}):
            assert calls_of(message) == [("custom", "run", "ls -l\n")]
        frame = r.ring.frames(Tokenize)[0]
        assert frame.grammar is not None


async def test_forced_calls_are_in_the_form_of_the_family(rig) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with rig(tools=HERMES) as r:
        r.ring.script = script(WEATHER)
        for choice in ("required", named):
            for message in await both_ways(r, tool_choice=choice):
                assert (calls_of(message), message["finish_reason"]) == ([CALLED_WEATHER], "tool_calls")
        assert {tuple(frame.grammar.markers) for frame in r.ring.frames(Tokenize)} == {("<tool_call>", "</tool_call>")}


async def test_a_forced_call_begins_behind_reasoning(rig) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with rig(tools=ToolDefaults(reasoning_parser="qwen3", reasoning_end="</think>")) as r:
        r.ring.script = script('<think>x</think>\n\n{"city": "Zürich"}')
        for message in await both_ways(r, tool_choice=named):
            assert (message["reasoning"], calls_of(message)) == ("x", [CALLED_WEATHER])
        for message in await both_ways(r, tool_choice=named, max_tokens=8):  # ends inside of the reasoning
            assert (message["reasoning"], message["tool_calls"], message["finish_reason"]) == ("x", [], "length")


async def test_usage_counts_tokens_of_reasoning(rig) -> None:
    usage = {"stream_options": {"include_usage": True}}
    async with rig(tools=BOTH) as r:
        r.ring.script = script("<think>abc</think>de")
        events = await r.events(CHAT, body(**usage))
        _, answer = await r.post(CHAT, body(include_reasoning=False))
        _, twice = await r.post(CHAT, body(n=2))
    counted = [whole["usage"]["completion_tokens_details"]["reasoning_tokens"] for whole in (events[-2], answer, twice)]
    assert counted == [3 + len("</think>"), 3 + len("</think>"), 2 * (3 + len("</think>"))]
    assert answer["usage"]["completion_tokens"] == len("<think>abc</think>de") + 1
    assert answer["choices"][0]["message"]["reasoning"] is None
    assert answer["choices"][0]["message"]["content"] == "de"


async def test_reasoning_is_left_out_of_streams_too(rig) -> None:
    async with rig(tools=BOTH) as r:
        r.ring.script = script("<think>abc</think>de")
        events = await r.events(CHAT, body(include_reasoning=False))
    assert added_up(events)["content"] == "de"
    assert not [event for event in events[:-1] if "reasoning" in event["choices"][0]["delta"]]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("hi <think>", "so</think>yes", ("so", "yes")),
        ("hi </think>", "<think>no", (None, "<think>no")),
        ("hi", "so</think>yes", (None, "so</think>yes")),
    ],
)
async def test_the_end_of_the_prompt_may_have_opened_reasoning(
    rig, prompt: str, text: str, expected: tuple[str | None, str]
) -> None:
    async with rig(tools=BOTH) as r:
        r.ring.script = script(text)
        for message in await both_ways(r, messages=[{"role": "user", "content": prompt}]):
            assert (message["reasoning"], message["content"]) == expected


async def test_other_fields_of_events_go_with_the_parts(rig) -> None:
    asked = {"return_token_ids": True, "logprobs": True, "n": 2, "return_stamps": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    text = f"<think>ab</think>{WEATHER}c"
    async with rig(tools=BOTH) as r:
        r.ring.stamp_s = 12.5
        r.ring.script = script(text, random.Random(1))
        events = await r.events(CHAT, body(**asked))
        _, answer = await r.post(CHAT, body(**{k: v for k, v in asked.items() if k != "stream_options"}))
    for index, whole in enumerate(answer["choices"]):
        shown = [e for e in events[:-1] if e["choices"] and e["choices"][0]["index"] == index]
        choices = [e["choices"][0] for e in shown]
        assert [i for c in choices for i in c["token_ids"] or []] == whole["token_ids"]
        assert [t for c in choices for t in (c["logprobs"] or {"content": []})["content"]] == whole["logprobs"][
            "content"
        ]
        message = added_up(events, index)
        assert (message["content"], message["reasoning"], calls_of(message)) == ("c", "ab", [CALLED_WEATHER])
        assert {e.get("stamp") for e in shown[1:]} == {12.5}
        assert all(e["usage"] for e in shown)
    assert events[-2]["usage"]["completion_tokens"] == 2 * len(answer["choices"][0]["token_ids"])


async def test_what_readers_need_is_asked_for(rig) -> None:
    async with rig(tools=BOTH) as r:
        await r.post(CHAT, body())
        await r.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        [of_chat, of_text] = r.ring.frames(Tokenize)
        [chat, text] = r.ring.frames(Generate)
    assert of_chat.reasoning_markers == ["<think>", "</think>"] and of_text.reasoning_markers == []
    assert chat.text.shown_special == ["</think>", "</tool_call>", "<think>", "<tool_call>"]
    assert text.text.shown_special == []
    async with rig() as r:
        await r.post(CHAT, body(tools=None, tool_choice=None))
        assert r.ring.frames(Tokenize)[0].reasoning_markers == []
        assert r.ring.frames(Generate)[0].text.shown_special == []


async def test_a_large_body_is_parsed_for_the_same_answer(rig) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "long", "description": "x" * LARGE_BYTES}}]
    async with rig(tools=HERMES) as r:
        r.ring.script = script(f"{WEATHER}\n{RUN}")
        for message in await both_ways(r, tools=tools):
            assert calls_of(message) == [CALLED_WEATHER, ("custom", "run", 'echo "é"\n')]


PLUGIN = """
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import PartKind
from blockyard.shared.tool_parsers.interface import ToolFormat

print("read")


def read(text, tools):
    yield from text.until(PartKind.CONTENT, Markers("!"))
    raise KeyError("no such thing")


FRAIL = ToolFormat("frail", "none", read, lambda rules, tools, parallel: "")
"""


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_format_that_raises_fails_its_request_alone(rig, tmp_path: Path, at_end: bool) -> None:
    (tmp_path / "frail.py").write_text(PLUGIN)
    config, plugins = ToolDefaults(auto_choice=True, parser="frail"), ParserPlugins(tools=str(tmp_path / "frail.py"))
    async with rig(tools=config, parser_plugins=plugins) as r:
        r.ring.step_s = 0.002
        r.ring.script = script("ab" if at_end else "ab!cd" + "e" * 50)
        other = asyncio.create_task(r.events("/v1/completions", {"prompt": "x", "max_tokens": 5}))
        status, answer = await r.post(CHAT, body())
        events = await r.events(CHAT, body())
        assert len(await other) == 6
        await r.until(lambda: not r.ring.running and r.gateway.num_active == 0)
        assert r.gateway.journal.entries == {}
        large = body(tools=[*TOOLS, {"type": "function", "function": {"name": "l", "description": "x" * LARGE_BYTES}}])
        assert (await r.post(CHAT, large))[0] == 422
    assert status == 422 and answer["error"]["code"] == "output_parser_failed"
    assert "--tool-call-parser frail" in answer["error"]["message"] and "no such thing" in answer["error"]["message"]
    assert events[-1]["error"] == answer["error"] and added_up(events[:-1])["content"] == "ab"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_killed_scheduler_changes_no_part(rig, stream: bool) -> None:
    async with rig(tools=BOTH) as r:
        r.ring.step_s = 0.005
        r.ring.script = script(f"<think>a</think>b{WEATHER}")
        asked = asyncio.create_task(r.events(CHAT, body()) if stream else r.post(CHAT, body()))
        for incarnation, tokens in ((22, 10), (23, 60)):  # inside of the reasoning, and of the arguments
            await r.until(lambda tokens=tokens: r.gateway.meters.output_tokens > tokens)
            r.ring.running.clear()
            r.ring.lose(SCHEDULER if incarnation == 22 else 22)
            r.ring.join(member(Role.SCHEDULER, incarnation, card=CARD))
        answer = await asyncio.wait_for(asked, 5)
        assert [frame.attempt for frame in r.ring.frames(Generate)][-1] >= 2
    message = added_up(answer) if stream else answer[1]["choices"][0]["message"]
    assert (message["content"], message["reasoning"], calls_of(message)) == ("b", "a", [CALLED_WEATHER])


async def test_many_and_large_tools(rig) -> None:
    many = [{"type": "function", "function": {"name": f"tool_{i}"}} for i in range(1000)]
    large = {"type": "object", "properties": {f"field_{i}": {"enum": ["x" * 90]} for i in range(8000)}}
    async with rig(tools=HERMES) as r:
        r.ring.script = script('<tool_call>\n{"name": "tool_999", "arguments": {}}\n</tool_call>')
        for choice in ("auto", "required"):
            status, answer = await r.post(CHAT, body(tools=many, tool_choice=choice))
            assert (status, calls_of(answer["choices"][0]["message"])) == (200, [("function", "tool_999", "{}")])
        tools = [{"type": "function", "function": {"name": "large", "parameters": large}}]
        assert (await r.post(CHAT, body(tools=tools)))[0] == 200
        status, answer = await r.post(CHAT, body(tools=tools, tool_choice="required"))
        assert (status, answer["error"]["param"]) == (400, "tools") and "bytes" in answer["error"]["message"]


async def test_auto_needs_a_parser(rig) -> None:
    async with rig() as r:
        status, answer = await r.post(CHAT, body())
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    assert "--enable-auto-tool-choice" in answer["error"]["message"]
    assert "--tool-call-parser" in answer["error"]["message"]
