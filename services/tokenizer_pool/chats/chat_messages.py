"""Turns chat messages of the API into the form that templates written for transformers expect."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from jinja2 import nodes

from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.request_fields.chat_messages import TEXT_PARTS

Message = dict[str, Any]
TEXT_ARGUMENT = "arguments"  # the name of a text in place of arguments
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
    return [_for_template(message, style) for message in messages]


def _for_template(message: Message, style: ContentStyle) -> Message:
    """Content as the style has it, arguments of calls decoded, and reasoning under all the names that templates use."""
    shown = _with_functions(message, _with_arguments)
    content = message.get("content")
    if isinstance(content, list):
        shown["content"] = [_part(part) for part in content] if style.loops else "\n".join(_texts(content))
    elif style.loops and not style.tests_string and isinstance(content, str):
        shown["content"] = [{"type": "text", "text": content}]
    elif content is None and not style.loops:
        shown["content"] = ""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        shown["reasoning_content"] = reasoning
        shown.setdefault("thinking", reasoning)
    return shown


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Arguments are JSON text in the API and objects in templates."""
    return {**function, "arguments": template_arguments(function["arguments"])}


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


def with_objects(messages: list[Message]) -> list[Message]:
    """Arguments that are text as objects, for templates that look into them. The same messages if there are none."""

    def wrapped(function: dict[str, Any]) -> dict[str, Any]:
        text = function["arguments"]
        return {**function, "arguments": {TEXT_ARGUMENT: text}} if isinstance(text, str) else function

    return [_with_functions(message, wrapped) for message in messages]


def _with_functions(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """A copy of the message, with the functions of its calls, as far as they have arguments, after `change`."""

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": change(function)}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [changed(call) for call in calls]} if isinstance(calls, list) else dict(message)


def template_arguments(given: object) -> dict[str, Any] | str:
    """The arguments of an earlier call as chat templates take them: the object, where there is one, and else the text.

    Never an error, because models write other values and cut texts, and a client can only send them again.

    Nothing and null are an empty object. A JSON string is decoded once, since models and clients encode twice.
    """
    if given is None or isinstance(given, dict):
        return given or {}
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    value = _decoded(text)
    if isinstance(value, str):
        text, value = value, _decoded(value)
    if value is None or not text.strip():
        return {}
    return value if isinstance(value, dict) else text


def _decoded(text: str) -> object:
    """The JSON value; False for text that is no JSON."""
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return value
