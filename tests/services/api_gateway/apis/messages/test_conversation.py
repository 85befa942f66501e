"""What a tokenizer gets of a request's blocks, and prompts of agents over several turns."""

import random
from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.apis.hidden_reasoning import HIDDEN, hide_reasoning
from blockyard.services.api_gateway.apis.messages.conversation import read_conversation
from blockyard.services.api_gateway.apis.messages.schemas import MessagesRequest
from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates

TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}
{%- if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEAD_ALONE = TEMPLATE.replace(
    "<|im_start|>{{",
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}<|im_start|>{{",
)


def conversation(messages: list[Any], system: Any = None) -> list[dict[str, Any]]:
    body = msgspec.json.encode({"messages": messages, "system": system})
    request = msgspec.json.decode(body, type=MessagesRequest)
    read: list[dict[str, Any]] = msgspec.json.decode(read_conversation(request.system, request.messages))
    return read


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Read", "input": arguments}


def result(call_id: str, content: Any = "done", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | more


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "Read", "arguments": arguments}}


def tool(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def test_every_kind_of_block() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    read = conversation(
        [
            {"role": "user", "content": "hi"},
            assistant(thinking, text("I look."), use("a", path="x"), use("b")),
            user(
                result("a", [text("one"), text("two")]),
                result("b", [{"type": "tool_reference", "tool_name": "Grep"}], is_error=False),
                text("go on"),
            ),
            assistant(thinking | {"thinking": "so"}, use("c")),
            user(result("c", "no such file", is_error=True)),
        ],
        "be brief",
    )
    parts = [text("one"), text("two")]
    assert read == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call("a", path="x"), call("b")],
        },
        tool("a", parts),
        tool("b", "The tool Grep is available."),
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call("c")]},
        tool("c", "Error: no such file"),
    ]


def test_thinking_that_was_not_shown_comes_back() -> None:
    signature = hide_reasoning("sécret 😀")
    for block in (
        {"type": "thinking", "thinking": "", "signature": signature},
        {"type": "redacted_thinking", "data": signature},
    ):
        [_, answer, _] = conversation([user(text("a")), assistant(block, text("b")), user(text("c"))])
        assert answer["reasoning_content"] == "sécret 😀"
    for foreign in ("EqQBCkYIBxgC", f"{HIDDEN}%%%", f"{HIDDEN}/w==", ""):
        [_, answer, _] = conversation(
            [user(text("a")), assistant({"type": "redacted_thinking", "data": foreign}, text("b")), user(text("c"))]
        )
        assert "reasoning_content" not in answer


def test_neighbours_of_one_role_are_one_turn_and_results_come_first() -> None:
    read = conversation(
        [
            {"role": "user", "content": "a"},
            user(text("b")),
            assistant(text("c")),
            assistant(use("x"), use("y")),
            user(text("before"), result("x")),
            {"role": "system", "content": "now"},
            user(result("y"), text("behind")),
        ]
    )
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "system", "tool", "user"]
    assert read[0]["content"] == [text("a"), text("b")] and read[-1]["content"] == [text("before"), text("behind")]
    assert [one["id"] for one in read[1]["tool_calls"]] == ["x", "y"]


def test_a_system_message_for_one_turn_alone() -> None:
    once = {"role": "system", "content": "once", "clear_at": "next_user_message"}
    assert [m["role"] for m in conversation([user(text("a")), once])] == ["user", "system"]
    assert [m["role"] for m in conversation([user(text("a")), once, assistant(), user(text("b"))])][1] == "assistant"


def body(turns: int, seed: int) -> dict[str, Any]:
    """A request as Claude Code sends it after so many turns with tools. Each has the history of the one before."""
    draw = random.Random(seed)
    reminder = text("<system-reminder>\nToday is Friday.\n</system-reminder>")
    messages: list[Any] = [user(reminder, text("Fix the tests."))]
    for turn in range(turns):
        ids = [f"toolu_{turn}_{i}" for i in range(draw.randint(1, 3))]
        blocks = [{"type": "thinking", "thinking": f"step {turn}", "signature": "blockyard"}] * draw.randint(0, 1)
        blocks += [text(f"Now {turn}.")] * draw.randint(0, 1)
        messages.append(assistant(*blocks, *(use(i, path=f"/{i}", limit=turn) for i in ids)))
        results = [
            result(i, draw.choice(["out", [text("out"), text("err")]]), is_error=draw.random() < 0.2) for i in ids
        ]
        messages.append(user(*results, *[text("<system-reminder>todo</system-reminder>")] * draw.randint(0, 1)))
        if draw.random() < 0.4:
            messages.append({"role": "system", "content": f"The user changed file {turn}."})
    last = messages[-1]
    if isinstance(last["content"], str):
        last["content"] = [text(last["content"])]
    last["content"][-1] |= {"cache_control": {"type": "ephemeral"}}  # moves with every turn
    noise = random.randrange(10**9)
    return {
        "system": [
            text(f"x-anthropic-billing-header: cc_version=2.1.{noise}; cch={noise:x};"),
            text("You are Claude Code.", cache_control={"type": "ephemeral"}),
            text("Environment: linux"),
        ],
        "messages": messages,
    }


@pytest.mark.parametrize("template", [TEMPLATE, HEAD_ALONE], ids=["system anywhere", "system at the head"])
def test_each_prompt_of_an_agent_is_a_prefix_of_the_next_one(template: str) -> None:
    templates = ChatTemplates({"default": template}, {})
    for seed in range(10):
        earlier = ""
        for turns in range(12):
            asked = body(turns, seed)
            messages = conversation(asked["messages"], asked["system"])
            prompt = templates.render(Chat(messages, [], {}, None, True, False))
            assert prompt.startswith(earlier) and len(prompt) > len(earlier) and "billing" not in prompt
            earlier = prompt
