"""Checks chat messages of a request and turns them into the messages of a chat template."""

from typing import Any, Literal

import msgspec

from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.tool_parsers.call_arguments import template_arguments
from blockyard.shared.tool_parsers.tools import CUSTOM_INPUT

NULL = msgspec.Raw(b"null")
# parts of content that are text, with the field that holds it; agents send back those of /v1/responses, too
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: msgspec.Raw = NULL
    input_audio: msgspec.Raw = NULL
    video_url: msgspec.Raw = NULL
    audio_url: msgspec.Raw = NULL
    file: msgspec.Raw = NULL
    detail: msgspec.Raw = NULL
    uuid: msgspec.Raw = NULL
    annotations: msgspec.Raw = NULL


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function of an earlier call. Clients send back what their libraries parsed, too."""

    name: str
    arguments: Any = None  # JSON text, or its value
    parsed_arguments: msgspec.Raw = NULL


class CalledCustom(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    input: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: msgspec.Raw = NULL  # of a streamed call


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Also accepts the fields of an earlier answer that a client sends back."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: msgspec.Raw = NULL
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form of one call
    audio: msgspec.Raw = NULL
    parsed: msgspec.Raw = NULL


class TextPart(msgspec.Struct, frozen=True):
    type: str
    text: str


class TemplateFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | str


class TemplateCall(msgspec.Struct, frozen=True):
    id: str
    type: str
    function: TemplateFunction


class TemplateMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message as a chat template sees it. The tokenizer joins parts if the template expects one text."""

    role: str
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[TemplateCall] | None = None
    tool_call_id: str | None = None


def read_messages(messages: list[Message] | None) -> bytes:
    """Returns the messages as JSON for Tokenize. Raises RequestError."""
    if not messages:
        raise RequestError("`messages` is empty" if messages == [] else "`messages` is missing", "messages")
    shown = [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    try:
        return msgspec.json.encode(shown)
    except RecursionError as e:
        raise RequestError("the arguments of a call are nested too deeply", "messages") from e


def _message(message: Message, where: str) -> TemplateMessage:
    if bytes(message.audio) not in (bytes(NULL), b"[]"):
        raise not_built(f"{where}.audio")
    content = message.content
    if content is None:
        if message.role not in ("assistant", "tool"):  # a tool may have nothing to say
            raise RequestError("content is missing", f"{where}.content")
        content = message.refusal or ""
    shown: str | list[TextPart] = content if isinstance(content, str) else _parts(content, f"{where}.content")
    role, call_id = message.role, None
    if role == "tool":
        call_id = message.tool_call_id
        if not call_id:
            raise RequestError("a message of the role tool needs the id of its call", f"{where}.tool_call_id")
    elif role == "function":
        if not message.name:
            raise RequestError("a message of the role function needs the function's name", f"{where}.name")
        role, call_id = "tool", _id_of(message.name)
    return TemplateMessage(
        role,
        shown,
        message.name,
        message.reasoning_content or message.reasoning,
        _calls(message, where),
        call_id,
    )


def _calls(message: Message, where: str) -> list[TemplateCall] | None:
    """The calls of an assistant's message; an older `function_call` is one of them. None: there are none."""
    given, older = message.tool_calls or [], message.function_call
    if not given and older is None:
        return None
    if message.role != "assistant":
        field = "tool_calls" if given else "function_call"
        raise RequestError(f"calls belong into messages of the role assistant, not {message.role}", f"{where}.{field}")
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(given)]
    if older is not None:
        calls.append(TemplateCall(_id_of(older.name), "function", _function(older)))
    return calls


def _call(call: ToolCall, where: str) -> TemplateCall:
    if not call.id:
        raise RequestError("a tool call needs its id", f"{where}.id")
    if call.type == "custom":
        if call.custom is None:
            raise RequestError("a call of type custom needs the field custom", f"{where}.custom")
        # as templates show the tool: a function with one argument
        return TemplateCall(call.id, "function", TemplateFunction(call.custom.name, {CUSTOM_INPUT: call.custom.input}))
    if call.function is None:
        raise RequestError("a call of type function needs the field function", f"{where}.function")
    return TemplateCall(call.id, "function", _function(call.function))


def _function(function: CalledFunction) -> TemplateFunction:
    return TemplateFunction(function.name, template_arguments(function.arguments))


def _id_of(name: str) -> str:
    """The id of a call in the older form, which has none: its result names the function alone."""
    return f"call_{name}"


def _parts(content: list[ContentPart], where: str) -> str | list[TextPart]:
    """Returns the text of a single part, or the list of parts."""
    texts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else [TextPart("text", text) for text in texts]


def _part(part: ContentPart, where: str) -> str:
    if (field := TEXT_PARTS.get(part.type)) is not None:
        text: str | None = getattr(part, field)
        if text is None:
            raise RequestError(f"a part of type {part.type} needs the field {field}", f"{where}.{field}")
        return text
    raise RequestError(
        f"this model takes text alone: parts of type {part.type[:40]!r} are not built yet",
        f"{where}.type",
        code="unsupported_content",
    )
