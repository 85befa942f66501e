"""Turns chat messages of the API into the form that templates written for transformers expect."""

from collections.abc import Iterator
from typing import Any

import msgspec
from jinja2 import nodes

from blockyard.shared.errors import RequestError

Message = dict[str, Any]
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
REASONING = ("reasoning_content", "thinking", "reasoning")


class ContentStyle(msgspec.Struct, frozen=True):
    """How a template reads `message.content`."""

    loops: bool  # over its parts; otherwise it expects a string
    tests_string: bool  # accepts both


# Values of --chat-template-content-format.
STYLES = {
    "string": ContentStyle(loops=False, tests_string=True),
    "openai": ContentStyle(loops=True, tests_string=False),
}


def content_style(template: nodes.Template) -> ContentStyle:
    """Looks for `for part in message.content`, also through a variable or filter."""
    names = {"content"}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _mentions_content(assign.node, names):
            names.add(assign.target.name)
    loops = any(_mentions_content(loop.iter, names) for loop in template.find_all(nodes.For))
    tests_string = any(test.name == "string" for test in template.find_all(nodes.Test))
    return ContentStyle(loops, tests_string)


def _mentions_content(node: nodes.Node, names: set[str]) -> bool:
    """True if the node is the content itself, possibly filtered, and not a value computed from it."""
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Filter() if node.node is not None:
            return _mentions_content(node.node, names)
        case nodes.CondExpr():
            return any(_mentions_content(n, names) for n in (node.expr1, node.expr2) if n is not None)
    return False


def for_template(messages: list[Message], style: ContentStyle) -> list[Message]:
    """Returns new messages for a template of this style. Raises RequestError for content it cannot render."""
    return [_with_reasoning(_with_arguments(_with_content(message, style))) for message in messages]


def _with_content(message: Message, style: ContentStyle) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        if style.loops:
            return {**message, "content": [_part(part) for part in content]}
        return {**message, "content": "\n".join(_texts(content))}
    if style.loops and not style.tests_string and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if content is None and not style.loops:
        return {**message, "content": ""}
    return dict(message)


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise RequestError(f"a content part must be an object or a string, got {type(part).__name__}", "messages")
    return part


def _texts(content: list[Any]) -> Iterator[str]:
    for part in map(_part, content):
        kind = part.get("type", "text")
        text = part.get(TEXT_PARTS.get(kind, "")) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise RequestError(f"this model's chat template takes text only, got a content part {kind!r}", "messages")
        yield text


def _with_arguments(message: Message) -> Message:
    """Decodes arguments of tool calls, which are JSON text in the API and objects in templates."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments", ""), str):
        return call
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise RequestError(f"arguments of a tool call are not JSON: {e}", "messages") from e
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning(message: Message) -> Message:
    """Sets reasoning under all the names that templates use, as transformers does."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
