"""Turns of a coding agent: each sends the whole history, and its prompt begins with that of the turn before."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response

from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates
from blockyard.shared import demo_model
from blockyard.shared.messages import Tokenize, ToolDefaults

PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
TEMPLATE = json.loads((Path(demo_model.__path__[0]) / "tokenizer_config.json").read_text())["chat_template"]
LARK = 'start: "*** Begin Patch\\n" /.+/ "*** End Patch\\n"'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "timeout_ms": {"type": "number"}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Documents.",
        "tools": [{"type": "function", "name": "read", "description": "Reads.", "parameters": {"type": "object"}}],
    },
]


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = [
    "<think>Look first.</think>I look.\n" + call("exec_command", {"cmd": "ls"}),
    call("apply_patch", {"input": "*** Begin Patch\n+x\n*** End Patch\n"}) + "\n" + call("read", {"page": 1}),
    call("tool_search", {"query": "lint"}),
    "<think>All found.</think>" + call("lint", {}),
    "<think>So.</think>Done.",
    "Welcome.",
]


def body(items: list[Any]) -> dict[str, Any]:
    """A body with the fields that a coding agent sends each turn."""
    return {
        "model": "tiny",
        "instructions": "You edit files.",
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-key",
        "client_metadata": {"x-codex-installation-id": "1", "session_id": "2"},
        "text": {"verbosity": "medium"},
        "stop": "<end>",
    }


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def sent_back(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as the agent keeps it: without its id, and of reasoning what is opaque."""
    names = ["id", "status"] + (["content"] if item["type"] == "reasoning" else [])
    return {name: value for name, value in item.items() if name not in names}


def result_of(item: dict[str, Any]) -> dict[str, Any] | None:
    """What the agent answers to a call."""
    match item["type"]:
        case "function_call":
            assert (item["name"] == "read") == (item.get("namespace") == "mcp__docs")
            assert json.loads(item["arguments"]) is not None
            return {"type": "function_call_output", "call_id": item["call_id"], "output": f"ran {item['name']}"}
        case "custom_tool_call":
            assert item["input"] == "*** Begin Patch\n+x\n*** End Patch\n"
            parts = [{"type": "input_text", "text": "Success."}]
            return {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": parts}
        case "tool_search_call":
            assert item["arguments"] == {"query": "lint"} and item["execution"] == "client"
            found = {"type": "function", "name": "lint", "parameters": {"type": "object"}, "defer_loading": True}
            output = {"type": "tool_search_output", "call_id": item["call_id"], "status": "completed"}
            return output | {"execution": "client", "tools": [found]}
    return None


def rendered(frame: Tokenize) -> str:
    """The prompt by the demo model's template, which shows tools and calls."""
    chat = Chat(
        msgspec.json.decode(frame.messages or b""),
        msgspec.json.decode(frame.tools),
        msgspec.json.decode(frame.template_kwargs),
        None,
        True,
        False,
    )
    return ChatTemplates({"default": TEMPLATE}, {"bos_token": ""}).render(chat)


async def turn(r: Any, items: list[Any]) -> list[dict[str, Any]]:
    """Asks, and returns the items of the answer as their events bring them."""
    async with r.http.post("/v1/responses", json=body(items)) as response:
        text = await response.text()
        assert response.status == 200, text
        assert response.headers["x-blockyard-ignored"] == "tools.web_search"
    events = [msgspec.json.decode(one.partition("data: ")[2]) for one in text.split("\n\n")[:-1]]
    done: list[dict[str, Any]] = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    Response.model_validate(events[-1]["response"])  # with tools of every kind
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"] == done
    return done


@pytest.mark.parametrize("keeps_content", [False, True])
async def test_each_prompt_begins_with_the_one_before(rig, keeps_content: bool) -> None:
    items = [message("developer", "Rules."), message("user", "Add x.")]
    seen: list[dict[str, Any]] = []
    async with rig(tools=PARSERS, max_model_len=20_000) as r:
        for place, answer in enumerate(ANSWERS):
            r.ring.script = lambda _, i, answer=answer: answer[i] if i < len(answer) else "<end>"
            done = await turn(r, items)
            seen += done
            items += done if keeps_content else [sent_back(item) for item in done]
            results = [result for item in done if (result := result_of(item)) is not None]
            items += results
            if not results:
                items.append(message("developer", "Cleared.") if place else message("user", "?"))
                items.append(message("user", "Thanks."))
        grammars = {frame.grammar.source for frame in r.ring.frames(Tokenize)}
        prompts = [rendered(frame) for frame in r.ring.frames(Tokenize)]
    assert len(prompts) == len(ANSWERS)
    assert all("Begin" in source and "pattern" in source for source in grammars)  # of patches, where the model decides
    for before, after in pairwise(prompts):
        assert after.startswith(before.removesuffix("<|im_start|>assistant\n")) and len(after) > len(before)
    assert "ran exec_command" in prompts[-1] and '"lint"' in prompts[-1] and '"lint"' not in prompts[2]
    reasoning = [json.loads(f.messages)[3].get("reasoning_content") for f in r.ring.frames(Tokenize)[1:]]
    assert set(reasoning) == {"Look first."}
    assert [item["type"] for item in seen].count("reasoning") == 3
